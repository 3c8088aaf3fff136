"""How many threads bulk work on files gets."""

from __future__ import annotations

import os
from typing import Final

from freetokend.core.errors import InvalidInputError

# More do not help a disk, and each one holds buffers.
_DEFAULT_MAX_COUNT: Final = 8
_MAX_COUNT: Final = 256


def threads_to_use(asked_count: int | None) -> int:
    """`asked_count`, or one per usable core up to 8; InvalidInputError outside 1..256."""
    if asked_count is None:
        return min(len(os.sched_getaffinity(0)), _DEFAULT_MAX_COUNT)
    if not 1 <= asked_count <= _MAX_COUNT:
        raise InvalidInputError(
            f"{asked_count} threads are outside 1..{_MAX_COUNT}.", param="threads"
        )
    return asked_count
