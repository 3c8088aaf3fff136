"""Pinning: in the background, in steps, keeping what succeeded and truthful about the rest."""

from __future__ import annotations

import json

from tests.native.host_support import new_mapping, run_child, wait_until

# As a service user: without CAP_IPC_LOCK the limit counts.
LIMITED = """
    import json, os, resource, sys
    from freetokend.native.pool import PoolMapping, create_pool_file

    limit = int(sys.argv[1])
    pool = create_pool_file("freetoken-pool-test", 16 << 20, "ab" * 32)
    mapping = PoolMapping(pool.fd)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    pinning = mapping.pin(step_bytes=8 << 20)
    while not pinning.state().done:
        pass
    state = pinning.state()
    print(json.dumps({
        "pinned": state.pinned_bytes, "total": state.total_bytes, "errno": state.error_number,
        "limited": state.limited, "note": state.note,
        "locked": mapping.pages().locked_bytes,
        "filled": mapping.filled,
    }))
    mapping.close()
"""


def test_a_small_pool_is_pinned_completely() -> None:
    with new_mapping((256 << 10) + 1) as mapping:
        pinning = mapping.pin(step_bytes=64 << 10)
        assert mapping.pin() is pinning
        wait_until(lambda: pinning.state().done, "pinning ends")
        state = pinning.state()
        assert state.pinned_bytes == state.total_bytes == (256 << 10) + 4096
        assert (state.error_number, state.limited, state.note) == (0, False, "")
        assert state.elapsed_s > 0
        assert mapping.pages().locked_bytes == state.pinned_bytes


def test_a_limit_leaves_a_part_pinned_and_is_named() -> None:
    limit_bytes = 6 << 20
    result = json.loads(run_child(LIMITED, arguments=[str(limit_bytes)]))
    assert limit_bytes - (4 << 20) <= result["pinned"] <= limit_bytes
    assert result["pinned"] == result["locked"]
    assert result["total"] == 16 << 20
    assert result["limited"] is True
    assert "LimitMEMLOCK=infinity" in result["note"]
    assert "6 MiB" in result["note"]


def test_a_limit_of_nothing_is_named_too() -> None:
    result = json.loads(run_child(LIMITED, arguments=["0"]))
    assert (result["pinned"], result["locked"]) == (0, 0)
    assert result["errno"] == 1
    assert result["limited"] is True
    assert "LimitMEMLOCK" in result["note"]


def test_an_abort_says_so_and_keeps_what_is_pinned() -> None:
    with new_mapping(4 << 20) as mapping:
        pinning = mapping.pin(step_bytes=4096)
        pinning.abort()
        state = pinning.state()
        assert state.done
        assert mapping.pages().locked_bytes == state.pinned_bytes
        assert bool(state.note) == (state.pinned_bytes < state.total_bytes)
