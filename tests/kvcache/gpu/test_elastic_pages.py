"""Pages in two arenas a layer: sizes, addresses and roll-back, on arenas of ordinary memory."""

from __future__ import annotations

import pytest
import torch

from freetokend.device.arena import Arena, ArenaError
from freetokend.device.host_arena import HostArena
from freetokend.kvcache.gpu.elastic_pages import ElasticPages
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.memory import tensor_at

MIB = 1 << 20
# 1 MiB of keys, and of values, in each of two layers.
SHAPE = KvShape(layers_count=2, kv_heads_count=8, head_size=128, element_bytes=2, page_tokens=512)
PARTS = 4


class Rig:
    """available_bytes: what all arenas together may still take."""

    def __init__(self, pages_count: int) -> None:
        self.limit_bytes = 1 << 30
        self.arenas: list[HostArena] = []
        self.pages = ElasticPages(
            SHAPE,
            pages_count,
            capacity_count=16,
            new_arena=self._new_arena,
            tensor_at=lambda address, size: tensor_at(address, size, torch.bfloat16),
        )

    def _new_arena(self, reserved_bytes: int) -> Arena:
        self.arenas.append(HostArena(reserved_bytes, available_bytes=self._available))
        return self.arenas[-1]

    def _available(self) -> int:
        return self.limit_bytes - sum(arena.committed_bytes for arena in self.arenas)


def test_memory_comes_and_goes_and_what_stays_keeps_its_place_and_bytes() -> None:
    rig = Rig(3)
    pages = rig.pages
    keys = pages.pages.layers[1].keys
    keys[2].fill_(7.0)
    before = keys.data_ptr()
    for count in (3, 16, 5, 3):
        (pages.grow_to if count == 16 else pages.shrink_to)(count)
        whole_bytes = PARTS * -(-count * MIB // (2 * MIB)) * 2 * MIB
        assert pages.committed_bytes == pages.claimed_bytes() == whole_bytes
        if count == 16:
            keys[15].fill_(1.0)
        assert bool((keys[2] == 7.0).all())
    assert pages.pages.layers[1].keys.data_ptr() == before
    pages.close()
    pages.close()
    assert pages.claimed_bytes() == 0


@pytest.mark.parametrize("ranges_that_fit", range(PARTS))
def test_a_growth_that_fails_in_any_range_leaves_all_as_they_were(ranges_that_fit: int) -> None:
    rig = Rig(2)
    held_bytes = rig.pages.committed_bytes
    rig.limit_bytes = held_bytes + ranges_that_fit * 6 * MIB + 1
    with pytest.raises(ArenaError, match="8 KV pages instead of 2") as refused:
        rig.pages.grow_to(8)
    assert refused.value.asked_bytes == PARTS * 6 * MIB
    assert refused.value.available_bytes == ranges_that_fit * 6 * MIB + 1
    assert rig.pages.committed_bytes == rig.pages.claimed_bytes() == held_bytes
    rig.limit_bytes = 1 << 30
    rig.pages.grow_to(8)
    assert rig.pages.committed_bytes == PARTS * 8 * MIB


def test_what_could_not_be_made_is_given_back() -> None:
    def broken(_address: int, _size: tuple[int, ...]) -> torch.Tensor:
        raise TypeError("torch does not look at such memory")

    arenas: list[HostArena] = []

    def new_arena(reserved_bytes: int) -> Arena:
        arenas.append(HostArena(reserved_bytes))
        return arenas[-1]

    with pytest.raises(TypeError):
        ElasticPages(SHAPE, 2, capacity_count=4, new_arena=new_arena, tensor_at=broken)
    assert [arena.claimed_bytes() for arena in arenas] == [0] * PARTS
