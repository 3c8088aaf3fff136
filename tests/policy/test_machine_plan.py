"""What a plan says of a machine, and that more of anything is never worse."""

from __future__ import annotations

import dataclasses

import pytest

from freetokend.core.errors import ConfigError
from freetokend.policy.known_models import KNOWN_MODELS
from freetokend.policy.machine_model import MODEL_ERROR_RATIO, MachineRates, exactly
from freetokend.policy.machine_plan import (
    Machine,
    MachinePlan,
    assumed_device_rate,
    plan_machine,
    ram_needed_bytes,
)
from freetokend.policy.vram_budget import Preset, VramWishes

GIB = 1 << 30
V4 = KNOWN_MODELS["deepseek-v4-flash"]
QWEN = KNOWN_MODELS["qwen3.6-35b-a3b"]
MACHINE = Machine(
    device_bytes=32 * GIB,
    rates=MachineRates(device=exactly(1792e9), link=exactly(52.7e9), host=exactly(60e9)),
    ram_bytes=192 * GIB,
)


def speed(plan: MachinePlan) -> float:
    return plan.decode.middle_tokens_per_s if plan.decode is not None else 0.0


def test_a_machine_that_is_large_enough() -> None:
    plan = plan_machine(V4, MACHINE, VramWishes())
    assert plan.runs
    assert plan.missing == ()
    assert plan.vram is not None
    assert plan.slots_count is not None
    assert plan.decode is not None
    assert plan.tokens_per_s is not None
    # About a tenth of the pool is resident, as published of this card.
    assert 0.09 < plan.slots_count.middle / V4.experts_count < 0.16
    assert plan.vram.slots_count == plan.slots_count.low
    assert sum(row.size_bytes for row in plan.vram.rows) == 32 * GIB - GIB // 2
    assert plan.tokens_per_s.high == pytest.approx(
        plan.decode.tokens_per_s.high * (1 + MODEL_ERROR_RATIO)
    )
    assert plan.tokens_per_s.low < 22
    assert plan.tokens_per_s.high > 25.4


def test_prompts_take_a_pass_of_the_pool_over_the_link() -> None:
    """8,192 tokens of this model were measured to take 1.19 to 1.22 s on such a link."""
    plan = plan_machine(QWEN, MACHINE, VramWishes())
    assert plan.sweep_s is not None
    assert plan.prefill_tokens_per_s is not None
    assert 1.19 <= plan.sweep_s.low <= plan.sweep_s.high <= 1.225
    assert plan.prefill_tokens_per_s.low == pytest.approx(6700, rel=0.01)


def test_what_every_expert_fits_into_streams_nothing() -> None:
    plan = plan_machine(QWEN, dataclasses.replace(MACHINE, device_bytes=141 * GIB), VramWishes())
    assert plan.vram is not None
    assert plan.vram.all_resident
    assert plan.sweep_s is None
    assert plan.prefill_tokens_per_s is None
    assert plan.decode is not None
    assert plan.decode.miss_ratio == 0
    assert plan.limited_by == "gpu_memory_rate"


def test_one_layer_of_slots_is_too_little_to_stream_through() -> None:
    plan = plan_machine(QWEN, MACHINE, VramWishes(preset=Preset.MINIMUM))
    assert plan.vram is not None
    assert plan.vram.slots_count == 256
    assert plan.prefill_tokens_per_s is None
    assert plan.sweep_s is not None


def test_too_little_ram_is_named_and_is_what_to_buy() -> None:
    machine = dataclasses.replace(MACHINE, ram_bytes=128 * GIB)
    plan = plan_machine(V4, machine, VramWishes())
    assert not plan.runs
    assert plan.tokens_per_s is None
    (missing,) = plan.missing
    assert missing.resource == "ram"
    assert missing.short_bytes == ram_needed_bytes(V4) - 128 * GIB
    assert plan.changes[0].resource == "ram"
    assert plan.changes[0].tokens_per_s is not None
    assert all(one.tokens_per_s is None for one in plan.changes[1:])
    assert plan_machine(V4, dataclasses.replace(MACHINE, ram_bytes=None), VramWishes()).runs


def test_too_little_gpu_memory_is_named_to_the_byte() -> None:
    machine = dataclasses.replace(MACHINE, device_bytes=12 * GIB)
    plan = plan_machine(V4, machine, VramWishes())
    (missing,) = plan.missing
    assert missing.resource == "gpu_memory"
    assert plan.vram is None
    enough = 12 * GIB + missing.short_bytes
    assert plan_machine(V4, dataclasses.replace(machine, device_bytes=enough), VramWishes()).runs
    less = dataclasses.replace(machine, device_bytes=enough - 1)
    assert not plan_machine(V4, less, VramWishes()).runs
    assert plan.changes[0].resource == "gpu_memory"
    assert plan.changes[0].tokens_per_s is not None


def test_changes_are_those_of_the_machine_with_just_that_changed() -> None:
    plan = plan_machine(V4, MACHINE, VramWishes())
    speeds = [one.tokens_per_s for one in plan.changes]
    assert None not in speeds
    assert speeds == sorted(speeds, key=lambda value: -(value or 0.0))
    by_name = {one.resource: one for one in plan.changes}
    assert set(by_name) == {"gpu_memory", "gpu_memory_rate", "link", "host_memory_rate"}
    faster = dataclasses.replace(
        MACHINE, rates=dataclasses.replace(MACHINE.rates, link=exactly(52.7e9 * 1.5))
    )
    link = by_name["link"]
    assert link.tokens_per_s == speed(plan_machine(V4, faster, VramWishes()))
    assert link.gain_ratio == pytest.approx(link.tokens_per_s / speed(plan) - 1)
    assert all((one.gain_ratio or 0.0) >= 0 for one in plan.changes)


def test_few_cores_hold_the_executor_back() -> None:
    slow_link = dataclasses.replace(MACHINE.rates, link=exactly(5e9))
    machine = dataclasses.replace(MACHINE, rates=slow_link, cores_count=2)
    plan = plan_machine(V4, machine, VramWishes())
    assert speed(plan) < speed(
        plan_machine(V4, dataclasses.replace(machine, cores_count=16), VramWishes())
    )
    by_name = {one.resource: one for one in plan.changes}
    assert by_name["host_memory_rate"].gain_ratio == pytest.approx(0)
    assert (by_name["cores"].gain_ratio or 0.0) > 0


@pytest.mark.parametrize("name", sorted(KNOWN_MODELS))
@pytest.mark.parametrize("preset", list(Preset))
def test_more_of_any_resource_never_predicts_slower(name: str, preset: Preset) -> None:
    model = KNOWN_MODELS[name]
    wishes = VramWishes(preset=preset)
    roomy = dataclasses.replace(MACHINE, device_bytes=64 * GIB, ram_bytes=1024 * GIB, cores_count=4)
    sizes = (6, 8, 12, 16, 24, 32, 48, 80, 96, 141, 600)
    rates = tuple(8e9 * 1.25**step for step in range(16))

    def speeds(machines: list[Machine]) -> list[float]:
        found = [plan_machine(model, machine, wishes) for machine in machines]
        assert all(plan.runs == (plan.decode is not None) for plan in found)
        return [speed(plan) for plan in found]

    for machines in (
        [dataclasses.replace(roomy, device_bytes=size * GIB) for size in sizes],
        [dataclasses.replace(roomy, ram_bytes=size * GIB) for size in sizes],
        [dataclasses.replace(roomy, cores_count=count) for count in range(1, 17)],
        *(
            [
                dataclasses.replace(
                    roomy, rates=dataclasses.replace(roomy.rates, **{which: exactly(rate)})
                )
                for rate in rates
            ]
            for which in ("device", "link", "host")
        ),
    ):
        found = speeds(machines)
        assert found == sorted(found)
        assert found[-1] > 0


def test_a_context_that_the_card_cannot_hold_is_missing_gpu_memory() -> None:
    short = plan_machine(V4, MACHINE, VramWishes(max_context_tokens=1_000_000))
    wide = plan_machine(V4, MACHINE, VramWishes(max_context_tokens=100_000))
    assert wide.runs
    assert speed(short) < speed(wide) < speed(plan_machine(V4, MACHINE, VramWishes()))
    with pytest.raises(ConfigError):
        plan_machine(V4, MACHINE, VramWishes(max_context_tokens=0))


def test_an_unknown_gpu_is_assumed_by_its_size() -> None:
    rates = [assumed_device_rate(size * GIB) for size in (1, 8, 12, 24, 32, 96)]
    assert [rate.low for rate in rates] == sorted(rate.low for rate in rates)
    assert [rate.high for rate in rates] == sorted(rate.high for rate in rates)
    # What the published machines have is among it.
    assert rates[1].low <= 256e9 <= rates[1].high
    assert rates[3].low <= 936e9 <= rates[3].high
    assert rates[4].low <= 1792e9 <= rates[4].high
