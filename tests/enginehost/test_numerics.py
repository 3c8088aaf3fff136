"""What engine.numerics becomes with the weights and the processor at hand, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freetokend.core.errors import ConfigError
from freetokend.enginehost import build
from freetokend.ftw.convert import convert
from freetokend.ftw.formats import parse_format
from freetokend.ftw.model import Wanted
from freetokend.ftw.reader import FtwDirectory
from freetokend.native.executor import Executor
from tests.enginehost.local_engine import ask, local_engine, serve

INT8 = "int8_g32_f16"


@pytest.fixture(scope="module")
def quantised(mixtral_source: Path, tmp_path_factory: pytest.TempPathFactory) -> FtwDirectory:
    """Experts in int8, all else in bf16."""
    target = tmp_path_factory.mktemp("quantised") / "ftw"
    convert(mixtral_source, target, wanted=Wanted(experts=parse_format(INT8)))
    return FtwDirectory(target)


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The numerics that the dense part and the experts were made with."""
    seen: list[str] = []

    def recording(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(options["numerics"])
            return original(*arguments, **options)

        return call

    for name in ("bank_experts", "NativeProgram"):
        monkeypatch.setattr(build, name, recording(getattr(build, name)))
    return seen


def notes_on_numerics(notes: tuple[str, ...]) -> list[str]:
    return [note for note in notes if "engine.numerics" in note]


def test_exact_is_the_default_and_needs_no_note(
    quantised: FtwDirectory, passed_on: list[str]
) -> None:
    with local_engine(quantised) as built:
        assert built.numerics == "exact"
        assert built.dense_formats == ("bf16",)
        assert notes_on_numerics(built.notes) == []
    assert passed_on == ["exact", "exact"]


def test_weights_without_such_a_path_are_computed_exactly_and_that_is_said(
    mixtral: FtwDirectory, passed_on: list[str]
) -> None:
    with local_engine(mixtral, numerics="fast") as built:
        assert built.numerics == "exact"
        (note,) = notes_on_numerics(built.notes)
        assert '"fast" changes nothing for weights in bf16 with the instruction set' in note
    assert passed_on == ["exact", "exact"]


def test_fast_reaches_the_experts_and_the_rest_is_named(
    quantised: FtwDirectory, passed_on: list[str]
) -> None:
    with Executor([0]) as executor:
        expected = "fast" if executor.has_fast(INT8) else "exact"
    with local_engine(quantised, numerics="fast") as built:
        assert built.numerics == expected
        (note,) = notes_on_numerics(built.notes)
        assert "weights in bf16" in note
        assert (INT8 in note) == (expected == "exact")
        assert len(serve(built, [ask("r", (1, 2, 3), 5)]).tokens["r"]) == 5
    assert passed_on == [expected, expected]


def test_unknown_numerics_are_refused(mixtral: FtwDirectory) -> None:
    with (
        pytest.raises(ConfigError, match='"half" is unknown'),
        local_engine(mixtral, numerics="half"),
    ):
        pass
