"""The rivals of a layer in a weight format: started, loaded, and asked for a batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.peers import ggml, kt_kernel
from benchmarks.peers.cache import PeerUnavailableError
from benchmarks.peers.child import Child
from benchmarks.peers.kt_weights import CANDIDATES
from freetokend.ftw.formats import Kind, WeightFormat

# A rival this far off has computed something else; its time says nothing.
WRONG_ERROR: Final = 0.1
# A rival with longer calls is timed once, not in rounds.
LONGEST_CALL_S: Final = 2.0
ALL: Final = ("ggml", "kt", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A loaded rival; `program` is "ggml", "kt" or "torch"."""

    program: str
    child: Child


class Rivals:
    """What could be loaded for one format and number of threads; `notes` tells what could not."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.loaded: list[Rival] = []
        self.notes: list[str] = []

    def add(self, program: str, make: Callable[[], Child], op: dict[str, object]) -> None:
        """Start and load a rival; a failure becomes a note."""
        try:
            child = self._stack.enter_context(make())
        except PeerUnavailableError as error:
            self.notes.append(f"left out: {error}")
            return
        try:
            about = child.ask("open", **op)
        except PeerUnavailableError as error:
            self.notes.append(f"left out: {error}")
            child.close()  # its weights would take memory from the others
            return
        child.rename(_full_name(child.name, about))
        self.loaded.append(Rival(program=program, child=child))

    def batch(self, tokens: int) -> list[Rival]:
        """Those that run such a batch well enough to be timed in rounds."""
        usable = []
        self.loaded = [rival for rival in self.loaded if not rival.child.ended]
        for rival in self.loaded:
            try:
                error_ratio = rival.child.ask("batch", tokens=tokens)["error_ratio"]
                call_s = 1 / rival.child.burst(0.0).rate
            except PeerUnavailableError as error:
                self.notes.append(f"left out with {tokens} tokens: {error}")
                continue
            if not error_ratio < WRONG_ERROR:
                self.notes.append(
                    f"{rival.child.name} left out with {tokens} tokens: its result is wrong "
                    f"(relative error {error_ratio:.2g})"
                )
            elif call_s > LONGEST_CALL_S:
                self.notes.append(
                    f"{rival.child.name} left out with {tokens} tokens: a call takes {call_s:.1f} s"
                )
            else:
                usable.append(rival)
        return usable


def _full_name(name: str, about: dict[str, Any]) -> str:
    for key in ("buffer", "class", "version"):
        if key in about:
            return f"{name} ({about[key]})"
    return name


@contextmanager
def rivals_of(
    weight_format: WeightFormat,
    cpus: Sequence[int],
    threads_count: int,
    *,
    isa: str,
    programs: Sequence[str] = ALL,
) -> Iterator[Rivals]:
    """Rivals with `threads_count` threads on the first of `cpus`. isa: "avx2" holds them to it."""
    with ExitStack() as stack:
        rivals = Rivals(stack)
        own = cpus[:threads_count]
        if "ggml" in programs:
            _add_ggml(rivals, str(weight_format), own, "avx2" if isa == "avx2" else "native")
        if "kt" in programs:
            # its caller needs a core of its own where there is one
            _add_kt(rivals, weight_format, cpus, threads_count, isa)
        if "torch" in programs and weight_format.kind is Kind.BF16:
            if importlib.util.find_spec("torch") is None:
                rivals.notes.append("left out: torch is not installed")
            else:
                rivals.add(
                    "torch",
                    lambda: Child("torch bf16", "benchmarks.peers.torch_child", own),
                    {"threads_count": threads_count},
                )
        yield rivals


def _add_ggml(rivals: Rivals, format_name: str, cpus: Sequence[int], build: str) -> None:
    types = ggml.TYPE_OF_FORMAT.get(format_name, ())
    if not types:
        rivals.notes.append(f"ggml has no type like {format_name}")
        return
    try:
        library = ggml.ensure_ggml_layer(build)
    except PeerUnavailableError as error:
        rivals.notes.append(f"left out: {error}")
        return
    for name in types:
        rivals.add(
            "ggml",
            lambda name=name: Child(f"ggml {name}", "benchmarks.peers.ggml_child", cpus),  # type: ignore[misc]
            {"library": str(library), "type_name": name, "threads_count": len(cpus)},
        )


def _add_kt(
    rivals: Rivals,
    weight_format: WeightFormat,
    cpus: Sequence[int],
    threads_count: int,
    isa: str,
) -> None:
    candidates = CANDIDATES.get(weight_format.kind.value, ())
    if not candidates:
        rivals.notes.append(f"kt-kernel has no form like {weight_format}")
        return
    try:
        directory = kt_kernel.ensure_kt_kernel()
        environment = {"LD_PRELOAD": str(kt_kernel.ensure_yield_library())}
    except PeerUnavailableError as error:
        rivals.notes.append(f"left out: {error}")
        return
    if isa == "avx2":
        environment["KT_KERNEL_CPU_VARIANT"] = "avx2"
    for candidate in candidates:
        rivals.add(
            "kt",
            lambda: Child("kt", "benchmarks.peers.kt_child", cpus, environment=environment),
            {
                "directory": str(directory),
                "candidate": candidate,
                "threads_count": threads_count,
            },
        )
