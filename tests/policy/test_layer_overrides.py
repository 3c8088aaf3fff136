"""`engine.layers`: what is read, and what a person is told who wrote it otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.errors import ConfigError, Reason
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.layer_overrides import nearest_entry, parse_layers

CPU, FILL = LayerBranch.CPU, LayerBranch.FILL


@pytest.mark.parametrize(
    ("text", "branches"),
    [
        ("", {}),
        ("  ", {}),
        ("0=cpu", {0: CPU}),
        ("0-3=cpu,7=fill", {0: CPU, 1: CPU, 2: CPU, 3: CPU, 7: FILL}),
        (" 2-2=fill , 1=cpu ", {2: FILL, 1: CPU}),
        ("007=fill", {7: FILL}),
    ],
)
def test_what_is_read(text: str, branches: dict[int, LayerBranch]) -> None:
    assert parse_layers(text) == branches


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0..3=cpu", 'did you mean "0-3=cpu"?'),
        ("0:cpu", 'did you mean "0=cpu"?'),
        ("0-3=CPU", 'did you mean "0-3=cpu"?'),
        ("layers 0 to 3 = cpu", 'did you mean "0-3=cpu"?'),
        ("7=fil", '"fil" is no branch (cpu or fill); did you mean "7=fill"?'),
        ("3-0=cpu", 'the range runs backwards; did you mean "0-3=cpu"?'),
        ("0-3", 'write for example "0-3=cpu,7=fill"'),
        ("0=split", '"split" is no branch (cpu or fill)'),
        ("-1=cpu", 'write for example "0-3=cpu,7=fill"'),
        ("0=cpu,", '"": it is not LAYER=BRANCH'),
        ("0=cpu;1=cpu", '"0=cpu;1=cpu": it is not LAYER=BRANCH'),
        ("0-3=cpu,2=fill", '"2=fill": layer 2 is set twice'),
        ("99999=cpu", "it is not LAYER=BRANCH"),
        ("٣=cpu", "it is not LAYER=BRANCH"),
    ],
)
def test_what_is_refused_and_how(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layers(text)
    assert words in caught.value.message
    assert caught.value.message.startswith("engine.layers: ")
    assert (caught.value.reason, caught.value.param) == (Reason.CONFIG_INVALID, "engine.layers")


def test_layers_that_the_model_does_not_have() -> None:
    assert parse_layers("0-3=cpu", 4) == dict.fromkeys(range(4), CPU)
    with pytest.raises(ConfigError, match="no MoE layer 4, the model has 0 to 3"):
        parse_layers("2-4=cpu", 4)
    with pytest.raises(ConfigError, match="has no MoE layers; remove the key"):
        parse_layers("0=cpu", 0)
    assert parse_layers("", 0) == {}


@given(st.dictionaries(st.integers(0, 9999), st.sampled_from((CPU, FILL)), min_size=1, max_size=9))
def test_every_mapping_can_be_written(branches: dict[int, LayerBranch]) -> None:
    assert parse_layers(",".join(f"{layer}={one}" for layer, one in branches.items())) == branches


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_and_a_hint_is_right(text: str) -> None:
    try:
        parse_layers(text, 10_000)
    except ConfigError:
        near = nearest_entry(text)
        if near:
            assert parse_layers(near)
