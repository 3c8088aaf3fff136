"""Bookkeeping of which tensors of a checkpoint a model has asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from freetokend.core.errors import InternalError, ModelDataError

_NAMES_SHOWN: Final = 5


class Consumption:
    """Every tensor is taken exactly once; what is left over at the end is an error.

    A tensor left over means that the checkpoint computes something the model does not, so serving
    it would give wrong text, not an error.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._left = dict.fromkeys(names)
        self._taken: set[str] = set()

    def take(self, name: str) -> None:
        """Mark a tensor as used; ModelDataError when the checkpoint has none of that name."""
        if name in self._taken:
            raise InternalError(f"the model asked for tensor {name!r} twice.")
        if name not in self._left:
            raise ModelDataError(
                f"tensor {name!r} is missing; the weights do not belong to this config.json."
            )
        del self._left[name]
        self._taken.add(name)

    def require_taken(self, name: str) -> None:
        """InternalError unless the tensor was taken before (one matrix used in two places)."""
        if name not in self._taken:
            raise InternalError(f"tensor {name!r} is shared before its first use.")

    def check_empty(self) -> None:
        """ModelDataError naming tensors that nobody took."""
        if not self._left:
            return
        names = list(self._left)
        shown = ", ".join(names[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        raise ModelDataError(
            f"the weights hold tensors that the model does not use: {shown}{more}; they would be "
            "silently left out of the computation."
        )


def check_shape(name: str, found: Iterable[int], expected: tuple[int, ...]) -> None:
    """ModelDataError when a tensor is not of the shape that config.json asks for."""
    if tuple(found) != expected:
        raise ModelDataError(
            f"tensor {name!r} has shape {list(found)}; config.json asks for {list(expected)}."
        )
