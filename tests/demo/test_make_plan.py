"""Making a plan, on a tiny random model: the parts, and that they agree with each other."""

from __future__ import annotations

import bz2
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from freetokend.demo import __main__ as command_line
from freetokend.demo.build import BuildRequest, build
from freetokend.demo.errors import DemoError
from freetokend.demo.gguf_model import DenseModel, open_dense_model
from freetokend.demo.plan.calibrate import calibrate, choose_neurons, plan_perplexity
from freetokend.demo.plan.format import UpcyclePlan
from freetokend.demo.plan.make import NEURON_RULES, PlanSettings
from freetokend.demo.plan.prompts import chat_prompts
from freetokend.demo.plan.router import balanced_clusters, expert_weights, fit_router
from freetokend.demo.plan.self_chat import answer
from freetokend.demo.plan.wiki_text import pack_windows, plain_articles, read_text_sets
from tests.demo.tiny_model import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    NEURONS,
    TOP_K,
    VOCABULARY,
    TinySource,
    make_tiny_source,
    tiny_plan,
)

Silent = Callable[[str], None]


@pytest.fixture
def model(tiny: TinySource, tmp_path: Path) -> DenseModel:
    return open_dense_model(tiny.wheel, tmp_path / "work")


def windows_of(count: int, tokens: int = 24) -> np.ndarray:
    return np.random.default_rng(3).integers(3, VOCABULARY, (count, tokens))


@pytest.mark.parametrize("plan", [tiny_plan(alpha=0.7), tiny_plan(alpha=0.0)])
def test_transformers_agrees_with_the_plan(
    plan: UpcyclePlan, tmp_path: Path, silent: Silent
) -> None:
    """The checkpoint in transformers and the plan on dense weights in numpy are one function."""
    tiny = make_tiny_source(tmp_path / "source", plan)
    out, work = tmp_path / "out", tmp_path / "work"
    build(
        BuildRequest(out=out, wheel=tiny.wheel, work=work, source=tiny.pin, plan=tiny.plan), silent
    )
    windows = windows_of(3)
    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = reference(input_ids=torch.from_numpy(windows)).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), torch.from_numpy(windows)[:, 1:].flatten()
    )
    ours = plan_perplexity(open_dense_model(tiny.wheel, work), plan, windows)
    # float16 weights against float32 ones.
    assert ours == pytest.approx(float(loss.exp()), rel=2e-3)
    assert plan_perplexity(open_dense_model(tiny.wheel, work), plan, windows, 1) != ours


def test_calibration_makes_a_valid_plan(model: DenseModel, silent: Silent) -> None:
    layers = calibrate(model, windows_of(10), EXPERTS, TOP_K, np.random.default_rng(0), silent)
    assert [layer.router.shape for layer in layers] == [(EXPERTS, HIDDEN)] * LAYERS
    plan = choose_neurons(layers, NEURONS // 2, 0.5, TOP_K)
    assert (plan.keep.sum(axis=-1) == NEURONS // 2).all()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            kept = plan.keep[layer, expert]
            usefulness = layers[layer].usefulness[expert]
            assert usefulness[kept].min() >= usefulness[~kept].max()


def test_keeping_all_neurons_is_the_dense_model(model: DenseModel, silent: Silent) -> None:
    layers = calibrate(model, windows_of(10), EXPERTS, TOP_K, np.random.default_rng(0), silent)
    everything = choose_neurons(layers, NEURONS, 0.0, TOP_K)
    windows = windows_of(2)
    routed, wrong = (plan_perplexity(model, everything, windows, roll) for roll in (0, 1))
    assert routed == pytest.approx(wrong, rel=1e-5)


def test_clusters_find_the_groups_and_the_router_tells_them_apart() -> None:
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(4), 200)
    directions = np.eye(4, 32, dtype=np.float32)
    x = directions[groups] + 0.05 * random.standard_normal((800, 32)).astype(np.float32)
    labels = balanced_clusters(x, 4, random)
    assert np.bincount(labels, minlength=4).max() < 800
    router = fit_router(x, labels, 4, random)
    assert ((x @ router.T).argmax(axis=-1) == labels).mean() > 0.95


def test_clusters_are_balanced() -> None:
    """Without the bias a single blob splits far less evenly."""
    random = np.random.default_rng(0)
    x = random.standard_normal((2000, 16)).astype(np.float32) + np.float32(2)
    sizes = np.bincount(balanced_clusters(x, 8, random), minlength=8)
    assert sizes.min() > 0.5 * 2000 / 8
    assert sizes.max() < 1.5 * 2000 / 8


def test_expert_weights_are_the_renormalised_top_k() -> None:
    x = np.eye(3, dtype=np.float32)
    router = np.array([[0, 1, 5], [1, 2, 5], [3, 4, 5], [2, 3, 5]], dtype=np.float32)
    weights = expert_weights(x, router, 2)
    assert (np.count_nonzero(weights, axis=-1) == 2).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(weights[0], [0, 0, 0.7310586, 0.26894143], rtol=1e-5)


def test_answers_do_not_depend_on_the_batch(
    model: DenseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding and the key-value cache change nothing: greedy answers alone and together agree."""
    monkeypatch.setattr("freetokend.demo.plan.self_chat._TOP_P", 1e-6)
    prompts = [[5, 6, 7, 8, 9], [10], [40, 41, 42]]
    together = answer(model, prompts, 12, 2, np.random.default_rng(0))
    for prompt, got in zip(prompts, together, strict=True):
        assert got[: len(prompt)] == prompt
        assert [got] == answer(model, [prompt], 12, 2, np.random.default_rng(1))
        # Feeding the answer's own beginning as the prompt leads to the same continuation.
        assert [got] == answer(model, [got[:-3]], 3, 2, np.random.default_rng(2))


def test_answers_end_with_the_end_mark(model: DenseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = answer(model, [[5, 6]] * 40, 60, 2, np.random.default_rng(0))
    assert any(chat[-1] == 2 for chat in chats)
    assert all(2 not in chat[:-1] for chat in chats)


def test_prompts_are_distinct() -> None:
    prompts = chat_prompts()
    assert len(prompts) == len(set(prompts)) == 64


PARAGRAPH = "A long enough paragraph of prose about one thing and another, to be counted. " * 4
PAGE = """<page><title>Thing</title><text xml:space="preserve">{{{{Infobox|a={{{{b}}}}}}}}
'''Thing''' is a [[kind of thing|thing]]&lt;ref name="x"&gt;No.&lt;/ref&gt;. {p}

[[File:Thing.jpg|thumb|A [[thing]]]] See [http://example.org the page]. {p}

== Heading ==
* a list item {p}
{p}

{p}</text></page>"""


def test_articles_lose_their_markup() -> None:
    short = "<page><title>Short</title><text>Too short.</text></page>"
    redirect = "<page><title>R</title><text>#REDIRECT [[Thing]]</text></page>"
    (article,) = plain_articles(short + redirect + PAGE.format(p=PARAGRAPH))
    title, first, second, *rest = article.split("\n\n")
    assert title == "Thing"
    assert first == f"Thing is a thing. {PARAGRAPH}".strip()
    assert second == f"See the page. {PARAGRAPH}".strip()
    assert rest == [PARAGRAPH.strip()] * 2


def test_text_sets_do_not_overlap(tmp_path: Path) -> None:
    wheel = tmp_path / "text.whl"
    folder = "gensim/test/test_data/"
    dump = "".join(
        PAGE.format(p=f"{number} {PARAGRAPH}").replace("Thing<", f"T{number}<")
        for number in range(20)
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            folder + "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
            bz2.compress(dump.encode()),
        )
        archive.writestr(folder + "lee_background.cor", "some news\n" * 100)
    sets = read_text_sets(wheel, _byte_tokenizer(), 7, 3)
    assert sets.calibration.shape == (7, 256)
    assert sets.held_out_wiki.shape == sets.held_out_news.shape == (3, 256)
    calibration = {row.tobytes() for row in sets.calibration}
    assert not calibration & {row.tobytes() for row in sets.held_out_wiki}


def test_text_wheel_without_the_text_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "text.whl", "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(DemoError, match="cannot read the text"):
        read_text_sets(tmp_path / "text.whl", _byte_tokenizer(), 1, 1)


def test_windows_are_packed_without_padding() -> None:
    packed = pack_windows([range(200), range(200, 600)])
    np.testing.assert_array_equal(packed, np.arange(512).reshape(2, 256))
    assert pack_windows([range(10)]).shape == (0, 256)


def _byte_tokenizer() -> Tokenizer:
    vocabulary = {chr(code): code for code in range(256)}
    document = {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    return Tokenizer.from_str(json.dumps(document))


def test_the_shipped_rules() -> None:
    assert {name: (rule.kept_share, rule.alpha) for name, rule in NEURON_RULES.items()} == {
        "demo": (0.5, 0.7),
        "stress": (0.75, 0.0),
    }


@pytest.mark.parametrize(
    "wrong", [{"top_k": 9}, {"top_k": 0}, {"windows": 0}, {"chat_tokens": 0}, {"prompts": -1}]
)
def test_settings_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(DemoError, match="must"):
        PlanSettings(**wrong)


def test_settings_are_checked_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["make-plan", f"--out={tmp_path}", "--top-k=9"]) == 1
    assert "--top-k must lie in 1..8" in capsys.readouterr().err
