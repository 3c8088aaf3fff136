"""The command line itself: help, usage errors, exit codes, imports and speed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from freetokend.control import ControlPlane
from freetokend.core.errors import REACTIONS
from freetokend.ctl.main import build_parser
from tests.ctl.conftest import Ctl

VERBS = ["status", "top", "wait", "cache", "version", "drain", "resume", "stop", "verify-cache"]
VERBS += ["log-level", "config", "sleep", "wake", "holds", "events"]
OFFLINE = ["ftw", "plan", "trace"]
# They need to be told what.
ASKING = ["resize", "hold"]


async def test_help_names_every_verb_and_exit_code(ctl: Ctl) -> None:
    done = await ctl("--help")
    assert (done.code, done.err) == (0, "")
    for verb in [*VERBS, *ASKING, *OFFLINE]:
        assert re.search(rf"^    {verb}( |$)", done.out, re.M), verb
    told = {int(code) for code in re.findall(r"^ +(\d+)  \w", done.out, re.M)}
    # 66 and 130 as a status of the table belong to HTTP requests only.
    assert {entry.exit_code for entry in REACTIONS.values()} - {66} <= told | {130}
    assert {0, 1, 64, 69, 75, 77, 130} <= told


async def test_the_documentation_tells_the_same(ctl: Ctl) -> None:
    text = (Path(__file__).parents[2] / "docs" / "freetokenctl.md").read_text()
    for verb in [*VERBS, *ASKING, *OFFLINE]:
        assert f"| `{verb}` |" in text
    codes = (await ctl("--help")).out.partition("exit codes:\n")[2].partition("\n\n")[0]
    assert f"```\n{codes}\n```\n" in text


@pytest.mark.parametrize("verb", [*VERBS, *ASKING])
async def test_every_verb_has_help(ctl: Ctl, verb: str) -> None:
    done = await ctl(verb, "--help")
    assert done.code == 0
    assert len(done.out.splitlines()) >= 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: VERB"),
        (["statsu"], "invalid choice: 'statsu'"),
        (["status", "--json"], "unrecognized arguments: --json"),
        (["top", "--interval", "soon"], "invalid float value: 'soon'"),
        (["log-level", "loud"], "invalid choice: 'loud'"),
        (["config"], "required: VERB"),
        (["top", "--count", "-1"], "--count -1 is below 0"),
    ],
)
async def test_usage_errors_have_exit_code_64(ctl: Ctl, arguments: list[str], words: str) -> None:
    done = await ctl(*arguments)
    assert done.code == 64
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("verb", [*(verb for verb in VERBS if verb != "config"), "config show"])
def test_every_verb_has_json_and_takes_the_socket_on_both_sides(verb: str) -> None:
    words = verb.split()
    before = build_parser().parse_args(["--socket", "a", *words, "-o", "json"])
    assert (before.socket, before.output) == ("a", "json")
    after = build_parser().parse_args([*words, "--output", "text", "--socket", "b"])
    assert (after.socket, after.output) == ("b", "text")
    both = build_parser().parse_args(["--socket", "a", *words, "--socket", "b"])
    assert (both.socket, both.output) == ("b", "text")
    assert build_parser().parse_args(words).socket is None


async def test_ftw_verbs_are_reached(ctl: Ctl, tmp_path: Path) -> None:
    done = await ctl("ftw", "info", str(tmp_path))
    assert done.code == 65
    assert str(tmp_path) in done.err
    assert (await ctl("ftw", "--help")).code == 0


IMPORTED = """\
import sys, json
from freetokend.ctl.main import main
code = main(sys.argv[1:])
import freetokend.ctl.changing, freetokend.ctl.top
names = [name for name, module in sys.modules.items() if type(module).__name__ != "_OnUse"]
print(json.dumps([code, names]))
"""


def test_no_verb_but_the_offline_ones_imports_arrays_or_tensors(
    environment: dict[str, str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, "status"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    code, modules = json.loads(done.stdout)
    assert code == 69
    heavy = {"numpy", "torch", "grpc", "asyncio", "ssl", "prometheus_client", "fastapi"}
    assert heavy.isdisjoint(modules)


async def test_a_status_imports_nothing_that_it_does_not_use(
    environment: dict[str, str], plane: ControlPlane
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", IMPORTED, "status"),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    out, _ = await process.communicate()
    code, modules = json.loads(out.splitlines()[-1])
    assert code == 0
    assert "grpc" in modules
    unused = {"asyncio", "ssl", "google.protobuf.text_format", "grpc.aio", "traceback"}
    assert unused.isdisjoint(modules)


def test_a_module_that_waits_for_its_use_is_itself_then() -> None:
    script = (
        "import sys\n"
        "from freetokend.ctl.quick_start import import_on_use\n"
        "import_on_use('json', 'os', 'email.utils')\n"
        "import json, os\n"
        "from email import utils\n"
        "assert type(os).__name__ == 'module' and type(json).__name__ == '_OnUse'\n"
        "from json import JSONDecodeError\n"
        "import json as again\n"
        "assert again is not json and again.loads('[1]') == json.loads('[1]') == [1]\n"
        "assert JSONDecodeError is json.JSONDecodeError is again.JSONDecodeError\n"
        "assert utils.parseaddr('A <b@c>') == ('A', 'b@c')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


async def test_a_reader_that_stops_is_no_error(
    environment: dict[str, str], plane: ControlPlane
) -> None:
    process = await asyncio.create_subprocess_shell(
        f"set -o pipefail; {sys.executable} -m freetokend.ctl top --interval 0.1 | head -1",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        executable="/bin/bash",
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out.count(b"\n") == 1


async def test_top_redraws_in_place_on_a_terminal(
    environment: dict[str, str], plane: ControlPlane
) -> None:
    import pty

    main_fd, terminal_fd = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "freetokend.ctl", "top", "--count", "2", "--interval", "0.1"),
        stdout=terminal_fd,
        env=environment,
    )
    os.close(terminal_fd)
    async with asyncio.timeout(60):
        code = await process.wait()
    shown = os.read(main_fd, 65536).decode()
    os.close(main_fd)
    assert code == 0
    assert shown.count("\x1b[H") == 2
    assert "freetokend 1.2.3, ready" in shown


async def test_status_takes_little_time(environment: dict[str, str], plane: ControlPlane) -> None:
    """CPU time, and beside it that of gRPC's import: a shared core stretches both."""
    command, bare = (sys.executable, "-m", "freetokend.ctl", "status"), "import grpc.aio"
    best_s = bare_s = float("inf")
    for _ in range(20):
        bare_s = min(bare_s, await cpu_time_s((sys.executable, "-c", bare), environment))
        best_s = min(best_s, await cpu_time_s(command, environment))
        if best_s <= 0.15:
            break
    assert best_s <= max(0.2, 1.5 * bare_s)


async def cpu_time_s(command: Sequence[str], environment: dict[str, str]) -> float:
    """What a process takes that has to end well."""
    before = os.times()
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, env=environment
    )
    assert await process.wait() == 0
    after = os.times()
    return (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )


def test_the_parser_can_be_walked() -> None:
    parser = build_parser(["ftw"])
    assert parser.parse_args(["ftw", "info", "x"]).handler is not None
    assert parser.parse_args(["status"]).handler == "reading:status"
