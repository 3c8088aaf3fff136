"""FlashInfer's store over what stands for the package; run with TRITON_INTERPRET=1, which stores
keys and values. Says "attended" at the end.

    python -m tests.kvcache.gpu.interpreted_flashinfer
"""

from __future__ import annotations

import importlib.util
import inspect
from array import array
from functools import partial

import pytest
import torch

from freetokend.core.errors import ConfigError
from freetokend.kvcache.batch import SequenceSpan, kv_batch
from freetokend.kvcache.gpu.flashinfer_store import FlashInferKvStore, choose_attention
from tests.kvcache.gpu import flashinfer_stub
from tests.kvcache.gpu.contexts import CONTEXT, LAYER, SCALE, Contexts, relative_error
from tests.kvcache.gpu.interpreted import CASES, patch_once, short_parts

HEADS = CASES[0][0]


def made() -> tuple[Contexts, FlashInferKvStore]:
    contexts = Contexts(HEADS, [50, 33, 16], 1)
    triton = short_parts(contexts, 16)
    store = FlashInferKvStore(triton, q_heads_count=HEADS.queries, package=flashinfer_stub)
    return contexts, store


def steps_are_those_of_float64() -> None:
    """Prompts, chunks and single tokens of several sequences, and pages full to the end."""
    contexts, store = made()
    at = [0, 0, 0]
    for step in ({0: 32, 1: 5}, {1: 27, 2: 16}, {0: 1, 1: 1}, {0: 17}):
        spans = [(sequence, at[sequence], at[sequence] + step[sequence]) for sequence in step]
        got = contexts.feed(store, spans)  # type: ignore[arg-type]
        exact = torch.cat([contexts.exact(*span) for span in spans])
        assert relative_error(got, exact) < 6e-3
        for sequence, _, end in spans:
            at[sequence] = end


def a_plan_is_made_once_for_all_layers_and_again_after_another() -> None:
    contexts, store = made()
    stub = store.attention

    def views() -> list[object]:
        return [
            store.view(
                kv_batch(
                    [
                        SequenceSpan(
                            pages=array("i", range(CONTEXT // 16)),
                            first_position=0,
                            tokens_count=count,
                        )
                    ],
                    16,
                )
            )
            for count in (3, 7)
        ]

    def attend(view: object, count: int, layer: int, scale: float) -> torch.Tensor:
        q, k, v = (one[0][:count] for one in (contexts.q, contexts.k, contexts.v))
        out: torch.Tensor = view.attend(layer, q, k, v, scale)  # type: ignore[attr-defined]
        return out

    short, long = views()
    first = attend(short, 3, 0, SCALE)
    assert torch.equal(attend(short, 3, LAYER, SCALE), first)
    assert [name for name, _, _ in stub.calls] == ["__init__", "plan", "run", "run"]
    attend(long, 7, 0, SCALE)
    assert torch.equal(attend(short, 3, LAYER, SCALE), first)
    assert not torch.equal(attend(short, 3, LAYER, 2 * SCALE), first)
    assert [name for name, _, _ in stub.calls[4:]] == ["plan", "run"] * 3


def calls_fit_the_package() -> None:
    """Where it is installed: the recorded signatures are its own, or what is called still fits."""
    contexts, store = made()
    contexts.feed(store, [(0, 0, 5), (1, 0, 1)])  # type: ignore[arg-type]
    calls = store.attention.calls
    assert {name for name, _, _ in calls} == {"__init__", "plan", "run"}
    classes = [flashinfer_stub.BatchPrefillWithPagedKVCacheWrapper]
    if importlib.util.find_spec("flashinfer") is not None:
        classes.append(importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper)
    for found in classes:
        for name, positional, named in calls:
            bound = inspect.signature(getattr(found, name)).bind(None, *positional, **named)
            theirs = inspect.signature(getattr(classes[0], name)).bind(None, *positional, **named)
            assert list(bound.arguments)[1:] == list(theirs.arguments)[1:], name


def the_choice_has_reasons() -> None:
    contexts, _ = made()
    make = partial(FlashInferKvStore, package=flashinfer_stub)
    triton = short_parts(contexts, 16)
    for layer in triton.pages.layers:
        layer.keys.zero_()
        layer.values.zero_()
    choose = partial(choose_attention, store=triton, q_heads_count=HEADS.queries)
    assert choose("triton", make=make).store is triton
    for asked, reason in (("auto", "installed and works"), ("flashinfer", "asks for it")):
        chosen = choose(asked, make=make)
        assert (chosen.name, isinstance(chosen.store, FlashInferKvStore)) == ("flashinfer", True)
        assert reason in chosen.reason

    class Wrong(flashinfer_stub.BatchPrefillWithPagedKVCacheWrapper):
        def run(self, *args: object, **kwargs: object) -> torch.Tensor:
            return 2 * super().run(*args, **kwargs)  # type: ignore[arg-type]

    class Package:
        BatchPrefillWithPagedKVCacheWrapper = Wrong

    def absent(*_: object, **__: object) -> FlashInferKvStore:
        raise ModuleNotFoundError("No module named 'flashinfer'")

    for broken, complaint in (
        (absent, "No module named"),
        (partial(FlashInferKvStore, package=Package), "not that token's value"),
    ):
        chosen = choose("auto", make=broken)
        assert chosen.name == "triton"
        assert complaint in chosen.reason
        with pytest.raises(ConfigError, match="cannot be had"):
            choose("flashinfer", make=broken)
    with pytest.raises(ConfigError, match="unknown; known are auto, flashinfer"):
        choose("xformers", make=make)


def main() -> None:
    patch_once()
    steps_are_those_of_float64()
    a_plan_is_made_once_for_all_layers_and_again_after_another()
    calls_fit_the_package()
    the_choice_has_reasons()
    print("attended")


if __name__ == "__main__":
    main()
