"""`freetokenctl bandwidth`: measure with progress, show with source and age."""

from __future__ import annotations

import json

from freetokend.control import ControlPlane
from freetokend.core.errors import Reason, UnavailableError
from freetokend.link.bandwidth_messages import BandwidthMeasured
from freetokend.policy.bandwidth_profile import Figure, FigureName
from tests.control.fakes import CACHE, CACHED, FakeGateway, FakeOperations
from tests.ctl.conftest import Ctl

MEASURED = BandwidthMeasured(
    run_id="r",
    figures=(
        Figure(name=FigureName.CPU, value=40e9, threads_count=4),
        Figure(name=FigureName.CPU_FIXED, value=12.5e-6, threads_count=4),
    ),
    notes=("disk: model.ftw cannot be read directly: Invalid argument",),
    duration_s=1.5,
)


async def test_a_run_tells_its_parts_and_what_it_found_and_show_knows_it(
    plane: ControlPlane, gateway: FakeGateway, operations: FakeOperations, ctl: Ctl
) -> None:
    gateway.set(description=CACHED, cache=CACHE)
    operations.measured = MEASURED
    done = await ctl("bandwidth", "run", "cpu", "disk", "--limit", "5")
    assert done.code == 0, done.err
    assert done.err == "measuring cpu ...\nmeasuring disk ...\n"
    assert ("cpu", "disk") in operations.measured_parts
    assert "cpu 4 threads" in done.out
    assert "12.5 us" in done.out
    assert "not measured: disk: model.ftw cannot be read directly" in done.out
    shown = await ctl("bandwidth", "show")
    assert shown.code == 0
    assert "served now: mxfp4, experts of 5 MiB, avx2 1.2.3" in shown.out
    assert "by the steps that are served:" in shown.out
    told = json.loads((await ctl("bandwidth", "show", "-o", "json")).out)
    (entry,) = told["entries"]
    assert entry["is_served"]
    assert [one["name"] for one in entry["figures"]] == ["cpu_bytes_per_s", "cpu_fixed_s"]
    assert {one["source"] for one in entry["figures"]} <= {"command", "boot"}
    assert entry["figures"][0]["age_s"] < 600
    assert {one["source"] for one in told["passive"]} == {"passive", "profile"}


async def test_a_run_that_a_request_ended_has_its_own_exit_code(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl
) -> None:
    operations.measured = BandwidthMeasured(
        run_id="r", interrupted="a request came", parts_left=("pair", "disk")
    )
    done = await ctl("bandwidth", "run")
    assert done.code == 75
    assert "ended early: a request came; left: pair, disk" in done.out
    told = json.loads((await ctl("bandwidth", "run", "-o", "json")).out)
    assert told["parts_left"] == ["pair", "disk"]


async def test_refusals_are_told(plane: ControlPlane, operations: FakeOperations, ctl: Ctl) -> None:
    wrong = await ctl("bandwidth", "run", "--limit", "1000")
    assert (wrong.code, wrong.out) == (64, "")
    assert "limit_s = 1000 is out of range" in wrong.err
    operations.error = UnavailableError(
        "bandwidths are being measured already", reason=Reason.QUEUE_FULL
    )
    refused = await ctl("bandwidth", "run")
    assert refused.code != 0
    assert refused.out == ""
    assert "bandwidths are being measured already" in refused.err
