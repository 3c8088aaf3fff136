"""Checks of what a caller sent."""

from __future__ import annotations

from freetokend.core.errors import InvalidInputError


def check_range(param: str, value: float, limits: tuple[float, float]) -> None:
    """Raises InvalidInputError with the field's name and range; not a number is out of it."""
    low, high = limits
    if not low <= value <= high:
        raise InvalidInputError(
            f"{param} = {value:.12g} is out of range; it must be from {low:.12g} to {high:.12g}",
            param=param,
        )
