"""`freetokenctl plan`: will it run there, how fast, and what to buy. Asks no daemon."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import asdict
from typing import Final

from freetokend.core.errors import ConfigError, InvalidInputError
from freetokend.core.model_config import supported_architectures
from freetokend.core.units import GIB, parse_bytes
from freetokend.ctl.plan_models import model_shape
from freetokend.ctl.plan_text import plan_text
from freetokend.ftw.formats import WeightFormat, parse_format
from freetokend.policy.machine_model import MachineRates, ModelShape, Range
from freetokend.policy.machine_plan import (
    CHUNK_TOKENS,
    Machine,
    MachinePlan,
    assumed_device_rate,
    plan_machine,
)
from freetokend.policy.vram_budget import Preset, VramWishes

EXIT_DOES_NOT_RUN: Final = 1
_LEAST_BYTES_PER_S: Final = 10e6
_MOST_BYTES_PER_S: Final = 100e12
_RATE: Final = re.compile(
    r"\s*(?:([\d.]+)\s*([A-Za-z]*)\s*-\s*)?([\d.]+)\s*([A-Za-z]+)/s\s*", re.ASCII
)


def plan(arguments: argparse.Namespace) -> int:
    """Print the answer; exit code 1 where the model would not run."""
    device_bytes = round(_number("--gpu-gib", arguments.gpu_gib, 0.5, 4096) * GIB)
    given_rate = arguments.gpu_bandwidth is not None
    machine = Machine(
        device_bytes=device_bytes,
        rates=MachineRates(
            device=(
                parse_rate("--gpu-bandwidth", arguments.gpu_bandwidth)
                if given_rate
                else assumed_device_rate(device_bytes)
            ),
            link=parse_rate("--b-p", arguments.b_p),
            host=parse_rate("--b-h", arguments.b_h),
        ),
        ram_bytes=(
            round(_number("--ram-gib", arguments.ram_gib, 1, 65536) * GIB)
            if arguments.ram_gib is not None
            else None
        ),
        cores_count=(
            _integer("--cores", arguments.cores, 1, 4096) if arguments.cores is not None else None
        ),
    )
    model = model_shape(arguments.model, _format(arguments.format))
    wishes = VramWishes(
        preset=Preset(arguments.preset),
        max_context_tokens=(
            _integer("--context", arguments.context, 1, model.context_tokens)
            if arguments.context is not None
            else None
        ),
    )
    found = _planned(model, machine, wishes)
    served = model.architecture in supported_architectures()
    if arguments.output == "json":
        document = _document(model, machine, found, served=served, given_rate=given_rate)
        print(json.dumps(document, indent=1))
    else:
        print(plan_text(model, machine, found, served=served, given_rate=given_rate))
    return 0 if found.runs else EXIT_DOES_NOT_RUN


def _planned(model: ModelShape, machine: Machine, wishes: VramWishes) -> MachinePlan:
    try:
        return plan_machine(model, machine, wishes)
    except ConfigError as error:
        # Its message speaks of configuration keys, which nobody has written here.
        raise InvalidInputError(f"--context or --preset: {error.message}") from error


def parse_rate(option: str, text: str) -> Range:
    """A rate or a range of rates, in bytes per second; InvalidInputError with option and range."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise InvalidInputError(
            f'{option} "{text}" is not a rate; write one such as 52.7GB/s, or a range such as '
            "56.7-77.3GB/s.",
            param=option,
        )
    low_number, low_unit, high_number, unit = match.groups()
    high = _rate(option, text, high_number, unit)
    low = high if low_number is None else _rate(option, text, low_number, low_unit or unit)
    if low > high:
        raise InvalidInputError(
            f'{option} "{text}" goes down; write the lower rate first.', param=option
        )
    return Range(low=low, high=high)


def _rate(option: str, text: str, number: str, unit: str) -> float:
    try:
        rate = float(parse_bytes(f"{number}{unit}"))
    except ValueError:
        raise InvalidInputError(
            f'{option} "{text}" is not a rate: "{number}{unit}" is no size. Units are B, kB, MB, '
            "GB, TB, KiB, MiB, GiB and TiB, each per second (52.7GB/s).",
            param=option,
        ) from None
    if not _LEAST_BYTES_PER_S <= rate <= _MOST_BYTES_PER_S:
        raise InvalidInputError(
            f'{option} "{text}" is out of range; it must be from 10MB/s to 100TB/s.', param=option
        )
    return rate


def _number(option: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise InvalidInputError(
            f'{option} "{text}" must be a number from {low:g} to {high:g}.', param=option
        )
    return value


def _integer(option: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise InvalidInputError(
            f'{option} "{text}" must be a whole number from {low} to {high}.', param=option
        )
    return int(text)


def _format(text: str | None) -> WeightFormat | None:
    if text is None:
        return None
    try:
        return parse_format(text)
    except ValueError as error:
        raise InvalidInputError(f"--format: {error}.", param="--format") from None


def _document(
    model: ModelShape, machine: Machine, found: MachinePlan, *, served: bool, given_rate: bool
) -> dict[str, object]:
    decode = found.decode
    return {
        "runs": found.runs,
        "missing": [asdict(one) for one in found.missing],
        "model": asdict(model)
        | {"pool_bytes": model.pool_bytes, "experts_count": model.experts_count, "served": served},
        "machine": asdict(machine) | {"device_rate_assumed": not given_rate},
        "gpu_memory": None if found.vram is None else asdict(found.vram),
        "slots_count": None if found.slots_count is None else asdict(found.slots_count),
        "decode_tokens_per_s": None if found.tokens_per_s is None else asdict(found.tokens_per_s),
        "decode": None if decode is None else asdict(decode),
        "limited_by": found.limited_by,
        "prefill": None
        if found.sweep_s is None
        else {
            "chunk_tokens": CHUNK_TOKENS,
            "sweep_s": asdict(found.sweep_s),
            "tokens_per_s": None
            if found.prefill_tokens_per_s is None
            else asdict(found.prefill_tokens_per_s),
        },
        "ram_needed_bytes": found.ram_needed_bytes,
        "changes": [asdict(one) for one in found.changes],
    }
