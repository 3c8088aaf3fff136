"""`engine.layers`: what the misses of single MoE layers do, from the text that a person writes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from freetokend.core.errors import ConfigError
from freetokend.policy.backend_choice import LayerBranch

BRANCHES: Final = (LayerBranch.CPU, LayerBranch.FILL)
_KEY: Final = "engine.layers"
_EXAMPLE: Final = '"0-3=cpu,7=fill"'
_ENTRY: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?=([a-z]+)", re.ASCII)
# What people write in the place of "-" and of "=".
_RANGE_MARKS: Final = re.compile(r"\s*(?:\.\.+|[\u2013\u2014]|\bto\b)\s*")
_BRANCH_MARKS: Final = re.compile(r"\s*(?:->|=+>?|:)\s*")


def parse_layers(text: str, moe_layers_count: int | None = None) -> Mapping[int, LayerBranch]:
    """The branch by MoE layer index (from 0, dense layers do not count) of "0-3=cpu,7=fill".

    Blanks around the entries mean nothing; the empty text is no override. `moe_layers_count`, once
    the model is known, bounds the layers. ConfigError names the entry and, for one that is not well
    formed, the nearest right form.
    """
    if not text.strip():
        return MappingProxyType({})
    branches: dict[int, LayerBranch] = {}
    for entry in (part.strip() for part in text.split(",")):
        first, last, branch = _parsed(entry)
        if moe_layers_count is not None and last >= moe_layers_count:
            raise _refusal(entry, _no_such_layer(last, moe_layers_count))
        for layer in range(first, last + 1):
            if layer in branches:
                raise _refusal(entry, f"layer {layer} is set twice; name every layer once")
            branches[layer] = branch
    return MappingProxyType(branches)


def _parsed(entry: str) -> tuple[int, int, LayerBranch]:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise _refusal(entry, f"it is not LAYER=BRANCH or FIRST-LAST=BRANCH; {_hint(entry)}")
    first, last = int(match[1]), int(match[2] or match[1])
    if match[3] not in BRANCHES:
        raise _refusal(
            entry, f'"{match[3]}" is no branch ({" or ".join(BRANCHES)}); {_hint(entry)}'
        )
    if last < first:
        raise _refusal(entry, f"the range runs backwards; {_hint(entry)}")
    return first, last, LayerBranch(match[3])


def _no_such_layer(layer: int, moe_layers_count: int) -> str:
    if moe_layers_count == 0:
        return "the model has no MoE layers; remove the key"
    return (
        f"there is no MoE layer {layer}, the model has 0 to {moe_layers_count - 1} (layers without "
        "experts do not count)"
    )


def _hint(entry: str) -> str:
    near = nearest_entry(entry)
    return f'did you mean "{near}"?' if near else f"write for example {_EXAMPLE}"


def nearest_entry(entry: str) -> str:
    """The well-formed entry that `entry` most probably stands for; "" where none is near."""
    text = _RANGE_MARKS.sub("-", entry.strip().lower())
    text = _BRANCH_MARKS.sub("=", text)
    match = re.fullmatch(r"(?:layers?\s*)?(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*=?\s*([a-z]+)", text)
    if match is None:
        return ""
    near = difflib.get_close_matches(match[3], BRANCHES, n=1, cutoff=0.5)
    if not near:
        return ""
    layers = [int(number) for number in (match[1], match[2]) if number]
    low, high = min(layers), max(layers)
    return f"{low}={near[0]}" if low == high else f"{low}-{high}={near[0]}"


def _refusal(entry: str, problem: str) -> ConfigError:
    return ConfigError(f'{_KEY}: "{entry}": {problem}', param=_KEY)
