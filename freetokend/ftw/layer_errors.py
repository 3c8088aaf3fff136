"""What quantisation costs each layer, summed up piece by piece and kept across interruptions.

Sums are kept per checksum block: those of a block are final when the block is, go into the journal
with it, and are added up in the order of blocks. So a conversion that was interrupted tells the
same as one that was not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Final

from freetokend.ftw.contents import DenseError, LayerError
from freetokend.ftw.families import layer_of
from freetokend.ftw.sources import SquaredError

MATRICES: Final = ("gate", "up", "down")
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSum:
    """Sums over the pieces of one matrix kind ("gate", ...) of one MoE layer in one block.

    moe_layer_index: None for a matrix that is no expert's, whose tensor `matrix` then names.
    """

    moe_layer_index: int | None
    matrix: str
    error: float
    values: float


class ErrorLedger:
    """The sums of one conversion. Safe between the thread that adds and the one that takes.

    Owner of all sums: `add` takes those of a piece before it is written, `take` closes a block.
    """

    def __init__(self, finished: Iterable[Sequence[ErrorSum]]) -> None:
        """Go on behind the blocks whose sums are given."""
        self._blocks: list[tuple[ErrorSum, ...]] = [tuple(block) for block in finished]
        self._waiting: deque[tuple[int, ErrorSum]] = deque()
        self._lock = threading.Lock()

    def add(
        self,
        end_bytes: int,
        moe_layer_index: int | None,
        errors: Iterable[tuple[str, SquaredError]],
    ) -> None:
        """Sums of a piece that ends at `end_bytes` of the region; pieces come in order."""
        with self._lock:
            for matrix, sums in errors:
                entry = ErrorSum(
                    moe_layer_index=moe_layer_index,
                    matrix=matrix,
                    error=sums.error,
                    values=sums.values,
                )
                self._waiting.append((end_bytes, entry))

    def take(self, end_bytes: int) -> tuple[ErrorSum, ...]:
        """The sums of the block that ends at `end_bytes`: of the pieces that end within it."""
        with self._lock:
            entries = []
            while self._waiting and self._waiting[0][0] <= end_bytes:
                entries.append(self._waiting.popleft()[1])
            block = tuple(_merged(entries))
            self._blocks.append(block)
            return block

    def layer(self, moe_layer_index: int, layer_index: int) -> LayerError | None:
        """What is known of a layer so far; None when nothing was measured."""
        sums = self._sums(moe_layer_index)
        if not sums:
            return None
        gate, up, down = (_ratio(sums.get(matrix)) for matrix in MATRICES)
        return LayerError(layer_index=layer_index, gate=gate, up=up, down=down)

    def dense(self, layer_index: int | None) -> DenseError | None:
        """What is known so far of a layer's matrices that are no experts; None: of what is
        outside the layers. None when nothing was measured."""
        sums = [entry for name, entry in self._sums(None).items() if layer_of(name) == layer_index]
        if not sums:
            return None
        worst = max(sums, key=_ratio)
        whole = ErrorSum(
            moe_layer_index=None,
            matrix="",
            error=fsum(entry.error for entry in sums),
            values=fsum(entry.values for entry in sums),
        )
        return DenseError(
            layer_index=layer_index,
            error=_ratio(whole),
            worst_tensor=worst.matrix,
            worst_error=_ratio(worst),
        )

    def _sums(self, moe_layer_index: int | None) -> dict[str, ErrorSum]:
        with self._lock:
            entries = [entry for block in self._blocks for entry in block]
            entries += [entry for _, entry in self._waiting]
        return {
            entry.matrix: entry
            for entry in _merged(e for e in entries if e.moe_layer_index == moe_layer_index)
        }


def _merged(entries: Iterable[ErrorSum]) -> list[ErrorSum]:
    sums: dict[tuple[int | None, str], tuple[float, float]] = {}
    for entry in entries:
        key = (entry.moe_layer_index, entry.matrix)
        error, values = sums.get(key, (0.0, 0.0))
        sums[key] = (error + entry.error, values + entry.values)
    return [
        ErrorSum(moe_layer_index=layer, matrix=matrix, error=error, values=values)
        for (layer, matrix), (error, values) in sums.items()
    ]


def _ratio(sums: ErrorSum | None) -> float:
    if sums is None or sums.values == 0.0:
        return 0.0
    return float(f"{sqrt(sums.error / sums.values):.{_DIGITS}g}")
