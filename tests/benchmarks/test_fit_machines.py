"""Published decode rates, each predicted from the other machines' alone."""

from __future__ import annotations

import pytest

from benchmarks.fit_machines import Prediction, fit, held_back, leave_one_out, table
from freetokend.policy.machine_model import FITTED, MODEL_ERROR_RATIO
from freetokend.policy.published_machines import HELD_BACK, MACHINES


@pytest.fixture(scope="module")
def others() -> list[Prediction]:
    return leave_one_out()


def test_every_machine_is_predicted_from_the_others_within_a_fifth(
    others: list[Prediction],
) -> None:
    errors = {one.machine.name: one.error_ratio for one in others}
    assert len(errors) == 6
    assert max(abs(error) for error in errors.values()) <= 0.20, errors


def test_the_error_that_plans_state_is_that_of_the_worst_machine(
    others: list[Prediction],
) -> None:
    worst = max(abs(one.error_ratio) for one in others)
    assert MODEL_ERROR_RATIO - 0.02 <= worst <= MODEL_ERROR_RATIO


def test_one_set_of_parameters_is_what_all_machines_fit() -> None:
    found = fit(MACHINES)
    assert found.layer_s == pytest.approx(FITTED.layer_s, rel=0.02)
    assert found.host_efficiency_ratio == pytest.approx(FITTED.host_efficiency_ratio, rel=0.02)
    assert found.device_efficiency_ratio == FITTED.device_efficiency_ratio


def test_deepseek_v4_flash_is_predicted_without_having_been_fitted() -> None:
    assert not {one.model.name for one in MACHINES} & {one.model.name for one in HELD_BACK}
    for one in held_back(FITTED):
        assert one.meets_range, table([one])
        assert abs(one.error_ratio) <= 0.20


def test_the_table_has_a_line_for_each(others: list[Prediction]) -> None:
    lines = table(others).splitlines()
    assert len(lines) == 7
    for line, machine in zip(lines[1:], MACHINES, strict=True):
        assert line.startswith(machine.name)
        assert line.endswith(machine.inputs)
