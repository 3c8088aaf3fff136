"""Decode rates that were published of six machines and what is known of each; facts only.

Rates and sizes are those published with the results, except the GPUs' own memory, which is on
their data sheets. What was given as a band, or follows from a rounded ratio, is a range here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freetokend.policy.known_models import KNOWN_MODELS
from freetokend.policy.machine_model import MachineRates, ModelShape, Range, exactly

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedMachine:
    """One result. slots_count: as published, None where it was not; context_tokens: about the
    length of the workload's sessions; tokens_per_s: a range where several were published."""

    name: str
    model: ModelShape
    device_bytes: int
    rates: MachineRates
    tokens_per_s: Range
    slots_count: Range | None
    context_tokens: int
    inputs: str


# Servers of which six threads were used: one band for all of them.
_CAPPED_HOST: Final = Range(low=56.7e9, high=77.3e9)
# "About 25": an x16 link of the fourth generation.
_PCIE4: Final = Range(low=24e9, high=26e9)
# The fastest that was measured, of the machine that was used for prefill.
_PCIE5: Final = exactly(52.7e9)
_QWEN: Final = KNOWN_MODELS["qwen3.6-35b-a3b"]
_V4: Final = KNOWN_MODELS["deepseek-v4-flash"]
# 37 % of this model's experts are resident on the 32 GB card; 11 % of the other's.
_QWEN_SLOTS: Final = exactly(0.37 * _QWEN.experts_count)
_W2_TOKENS: Final = 32_768

MACHINES: Final[tuple[PublishedMachine, ...]] = (
    PublishedMachine(
        name="RTX 4060 laptop",
        model=KNOWN_MODELS["qwen3.6-35b-a3b-nvfp4"],
        device_bytes=8188 * _MIB,
        rates=MachineRates(device=exactly(256e9), link=exactly(11.8e9), host=exactly(47.5e9)),
        tokens_per_s=exactly(39.3),
        slots_count=None,
        context_tokens=_W2_TOKENS,
        inputs="formats of the dense weights, slots",
    ),
    PublishedMachine(
        name="RTX 3090",
        model=_QWEN,
        device_bytes=24576 * _MIB,
        rates=MachineRates(device=exactly(936e9), link=_PCIE4, host=_CAPPED_HOST),
        tokens_per_s=exactly(36.2),
        slots_count=None,
        context_tokens=_W2_TOKENS,
        inputs="B_P, B_H as bands; slots",
    ),
    PublishedMachine(
        name="RTX 4090",
        model=_QWEN,
        device_bytes=24564 * _MIB,
        rates=MachineRates(device=exactly(1008e9), link=_PCIE4, host=_CAPPED_HOST),
        tokens_per_s=exactly(42.9),
        slots_count=None,
        context_tokens=_W2_TOKENS,
        inputs="B_P, B_H as bands; slots",
    ),
    PublishedMachine(
        name="RTX 5090 server",
        model=_QWEN,
        device_bytes=32607 * _MIB,
        rates=MachineRates(device=exactly(1792e9), link=_PCIE5, host=_CAPPED_HOST),
        tokens_per_s=exactly(76.7),
        slots_count=_QWEN_SLOTS,
        context_tokens=_W2_TOKENS,
        inputs="B_H as a band",
    ),
    PublishedMachine(
        name="RTX 5090 desktop",
        model=_QWEN,
        device_bytes=32607 * _MIB,
        # B_P:B_H is about 1:1.1.
        rates=MachineRates(
            device=exactly(1792e9),
            link=Range(low=53.8e9 / 1.15, high=53.8e9 / 1.05),
            host=exactly(53.8e9),
        ),
        tokens_per_s=exactly(73.8),
        slots_count=_QWEN_SLOTS,
        context_tokens=_W2_TOKENS,
        inputs="B_P from a rounded ratio",
    ),
    PublishedMachine(
        name="RTX PRO 6000",
        model=KNOWN_MODELS["glm-5.2"],
        device_bytes=97887 * _MIB,
        # B_P:B_H is about 1:3.5.
        rates=MachineRates(
            device=exactly(1792e9),
            link=Range(low=178e9 / 3.55, high=178e9 / 3.45),
            host=exactly(178e9),
        ),
        tokens_per_s=exactly(14.9),
        slots_count=None,
        context_tokens=_W2_TOKENS,
        inputs="B_P from a rounded ratio; formats of the dense weights, slots",
    ),
)

# Never part of a fit.
HELD_BACK: Final[tuple[PublishedMachine, ...]] = (
    PublishedMachine(
        name="RTX 5090, DeepSeek-V4-Flash",
        model=_V4,
        device_bytes=32607 * _MIB,
        rates=MachineRates(
            device=exactly(1792e9),
            link=Range(low=53.8e9 / 1.15, high=_PCIE5.high),
            host=Range(low=53.8e9, high=_CAPPED_HOST.high),
        ),
        tokens_per_s=Range(low=22.0, high=25.0),
        slots_count=exactly(0.11 * _V4.experts_count),
        context_tokens=_W2_TOKENS,
        inputs="B_P, B_H of both, as it is not said which; formats of the dense weights",
    ),
    PublishedMachine(
        name="RTX 5090 desktop, DeepSeek-V4-Flash, 1024 slots",
        model=_V4,
        device_bytes=32607 * _MIB,
        rates=MachineRates(
            device=exactly(1792e9),
            link=Range(low=53.8e9 / 1.15, high=53.8e9 / 1.05),
            host=exactly(53.8e9),
        ),
        tokens_per_s=exactly(25.4),
        slots_count=exactly(1024),
        context_tokens=4_096,
        inputs="B_P from a rounded ratio; formats of the dense weights",
    ),
)
