"""`freetokenctl ftw convert | verify | info`: offline work on FTW directories."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from freetokend.core.errors import FreetokenError, reaction
from freetokend.core.model_config import supported_architectures
from freetokend.ftw.convert import DEFAULT_SHARD_BYTES, ConvertProgress, convert
from freetokend.ftw.formats import FORMAT_NAMES, WeightFormat, parse_format
from freetokend.ftw.index import FtwIndex, read_index
from freetokend.ftw.layout import ROWS16
from freetokend.ftw.model import Wanted
from freetokend.ftw.verify import Damage, VerifyProgress, verify

_EXIT_DAMAGED: Final = 1
_EXIT_INTERRUPTED: Final = 130
_REPORT_INTERVAL_S: Final = 0.5
_UNITS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `ftw`; each parsed command carries `handler(arguments) -> exit code`."""
    ftw = subparsers.add_parser(
        "ftw",
        help="convert, check and describe model directories",
        description="Works on FTW directories, the form in which freetokend loads models.",
    )
    verbs = ftw.add_subparsers(dest="ftw_verb", required=True, metavar="VERB")
    _add_convert(verbs)
    _add_verify(verbs)
    _add_info(verbs)


def _add_convert(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "convert",
        help="make an FTW directory from a Hugging Face checkpoint",
        description=(
            "Converts safetensors, also quantised ones, or a GGUF model. "
            "Needs little memory whatever the model. "
            "If it is interrupted, run it again: it goes on where it was. "
            f"FORMAT is one of {FORMAT_NAMES}."
        ),
    )
    parser.add_argument("source", type=Path, help="directory with config.json and weights")
    parser.add_argument("target", type=Path, help="directory to create")
    parser.add_argument(
        "--force", action="store_true", help="replace an FTW directory that is already there"
    )
    parser.add_argument(
        "--shard-bytes",
        type=_count,
        default=DEFAULT_SHARD_BYTES,
        metavar="N",
        help="largest file to write, at least 67108864 (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=_count, metavar="N", help="threads that read and pack (default: cores)"
    )
    parser.add_argument(
        "--quantize",
        type=_format,
        metavar="FORMAT",
        help="weight format of the routed experts (default: the checkpoint's, else bf16)",
    )
    parser.add_argument(
        "--quantize-dense",
        type=_format,
        metavar="FORMAT",
        help=(
            "weight format of the other linear layers; router, norms and embedding stay as they "
            "are (default: the checkpoint's, else bf16)"
        ),
    )
    _add_output(parser)
    parser.set_defaults(handler=_convert)


def _add_verify(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "verify",
        help="read an FTW directory and compare every block with its checksum",
        description=(
            "Exit code 0: every byte is as it was written; 1: damage was found and named; "
            "other: the index itself cannot be used."
        ),
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--threads", type=_count, metavar="N", help="threads that read (default: cores)"
    )
    _add_output(parser)
    parser.set_defaults(handler=_verify)


def _add_info(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("info", help="describe an FTW directory")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tensors", action="store_true", help="list every tensor too")
    _add_output(parser)
    parser.set_defaults(handler=_info)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="form of the answer"
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _format(text: str) -> WeightFormat:
    try:
        return parse_format(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _guarded(work: Callable[[], int]) -> int:
    """Run `work`; tell errors on stderr and turn them into exit codes."""
    try:
        return work()
    except FreetokenError as error:
        print(f"freetokenctl: {error.message}", file=sys.stderr)
        return reaction(error.reason).exit_code
    except KeyboardInterrupt:
        print("freetokenctl: interrupted; run the same command again to go on.", file=sys.stderr)
        return _EXIT_INTERRUPTED


def _convert(arguments: argparse.Namespace) -> int:
    meter = _Meter("converted")

    def report(progress: ConvertProgress) -> None:
        if progress.note:
            meter.say(progress.note)
        else:
            meter.update(progress.done_bytes, progress.total_bytes)

    def work() -> int:
        index = convert(
            arguments.source,
            arguments.target,
            progress=report,
            max_shard_bytes=arguments.shard_bytes,
            force=arguments.force,
            threads_count=arguments.threads,
            wanted=Wanted(experts=arguments.quantize, dense=arguments.quantize_dense),
        )
        if not any(side.file == "tokenizer.json" for side in index.side_files):
            meter.say(
                f"warning: {arguments.source} has no tokenizer.json: {arguments.target} can be "
                "verified but not served over HTTP."
            )
        if arguments.output == "json":
            print(json.dumps(describe(index, tensors=False), indent=1))
        else:
            print(f"{arguments.target}: {_size(index.region_bytes)}, identity {index.identity}")
        return 0

    return _guarded(work)


def _verify(arguments: argparse.Namespace) -> int:
    meter = _Meter("verified")

    def report(progress: VerifyProgress) -> None:
        meter.update(progress.done_bytes, progress.total_bytes)

    def work() -> int:
        damage = verify(arguments.directory, report, threads_count=arguments.threads)
        if arguments.output == "json":
            print(json.dumps({"damage": [asdict(found) for found in damage]}, indent=1))
        else:
            _print_damage(arguments.directory, damage)
        return _EXIT_DAMAGED if damage else 0

    return _guarded(work)


def _print_damage(directory: Path, damage: list[Damage]) -> None:
    for found in damage:
        print(found.problem)
    if damage:
        count = f"{len(damage)} damaged place" + ("s" if len(damage) > 1 else "")
        print(f"{directory}: {count}. Copy these files again or convert again.")
    else:
        print(f"{directory}: every byte is as it was written.")


def _info(arguments: argparse.Namespace) -> int:
    def work() -> int:
        index = read_index(arguments.directory)
        document = describe(index, tensors=arguments.tensors)
        if arguments.output == "json":
            print(json.dumps(document, indent=1))
        else:
            _print_info(document)
        return 0

    return _guarded(work)


def describe(index: FtwIndex, *, tensors: bool) -> dict[str, object]:
    """The facts of an index as a JSON object; `tensors` adds every tensor."""
    bank = asdict(index.expert_bank)
    bank["length_bytes"] = index.expert_bank.length_bytes
    document: dict[str, object] = {
        "architecture": index.architecture,
        "model_type": index.model_type,
        "is_served": index.architecture in supported_architectures(),
        "format_version": index.format_version,
        "layout_version": index.layout_version,
        "identity": index.identity,
        "source_identity": index.source.identity,
        "region_bytes": index.region_bytes,
        "shards_count": len(index.shards),
        "tensors_count": len(index.tensors),
        "sources_count": len(index.sources),
        "tied_embeddings": index.tied_embeddings,
        "expert_bank": bank,
        "dense_formats": sorted(
            {entry.dtype for entry in index.tensors.values() if entry.layout == ROWS16}
        ),
        "quantisation": asdict(index.quantisation),
        "router": asdict(index.router),
        "side_files": [side.file for side in index.side_files],
    }
    if tensors:
        document["tensors"] = {name: asdict(entry) for name, entry in index.tensors.items()}
    return document


def _print_info(document: dict[str, object], indent: str = "") -> None:
    width = max((len(key) for key in document), default=0)
    for key, value in document.items():
        if isinstance(value, dict):
            print(f"{indent}{key}:")
            _print_info(value, indent + "  ")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            print(f"{indent}{key}:")
            for item in value:
                print(f"{indent}  {' '.join(f'{name} {part}' for name, part in item.items())}")
        else:
            print(f"{indent}{key:<{width}}  {_shown(key, value)}")


def _shown(key: str, value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() if key.endswith("_bytes"):
            return f"{value} ({_size(value)})"
        case list() | tuple():
            return " ".join(str(item) for item in value)
        case _:
            return str(value)


def _size(count_bytes: int) -> str:
    for unit, unit_bytes in _UNITS:
        if count_bytes >= unit_bytes:
            return f"{count_bytes / unit_bytes:.2f} {unit}"
    return f"{count_bytes} bytes"


class _Meter:
    """Progress on stderr: one line that rewrites itself on a terminal, else a line per 10 %."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._started_s = time.monotonic()
        self._shown_s = float("-inf")
        self._first_bytes: int | None = None
        self._next_tenth = 1
        self._finished = False
        self._is_terminal = sys.stderr.isatty()

    def say(self, note: str) -> None:
        """A sentence on a line of its own."""
        print(f"freetokenctl: {note}", file=sys.stderr)

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far the work is."""
        if self._first_bytes is None:
            self._first_bytes = done_bytes
        now_s = time.monotonic()
        if self._finished:
            return
        self._finished = done_bytes >= total_bytes
        if self._is_terminal:
            if self._finished or now_s - self._shown_s >= _REPORT_INTERVAL_S:
                self._shown_s = now_s
                end = "\n" if self._finished else ""
                line = self._line(done_bytes, total_bytes, now_s)
                print(f"\r{line:<78}", end=end, file=sys.stderr, flush=True)
        elif done_bytes * 10 >= self._next_tenth * total_bytes:
            self._next_tenth = done_bytes * 10 // total_bytes + 1
            print(self._line(done_bytes, total_bytes, now_s), file=sys.stderr, flush=True)

    def _line(self, done_bytes: int, total_bytes: int, now_s: float) -> str:
        moved_bytes = done_bytes - (self._first_bytes or 0)
        rate_bytes_per_s = moved_bytes / max(now_s - self._started_s, 1e-6)
        percent = 100 * done_bytes // total_bytes
        return (
            f"{self._verb} {_size(done_bytes)} of {_size(total_bytes)} ({percent} %), "
            f"{_size(int(rate_bytes_per_s))}/s"
        )
