"""Lets the dense model answer prompts; its chats are calibration text in its own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freetokend.demo.gguf_model import DenseModel, Matrix, ModelShape
from freetokend.demo.plan.llama import (
    AttentionWeights,
    FfnWeights,
    KeyValues,
    TokenIds,
    attend,
    ffn_activations,
    linear,
    load_attention,
    load_ffn,
    project_qkv,
    rms_norm,
    softmax,
)

_TEMPERATURE = np.float32(0.7)
_TOP_P = 0.95
# The nucleus is looked for among so many best tokens: sorting all 49,152 costs more than the model.
_CANDIDATES = 1024


@dataclass(frozen=True)
class _LoadedModel:
    """Every weight in float32 (540 MB): sampling reads them all for each token."""

    shape: ModelShape
    embedding: Matrix  # [vocabulary, hidden]; also the output head
    final_norm: Matrix
    layers: tuple[tuple[AttentionWeights, FfnWeights], ...]


def answer(
    model: DenseModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    eos_id: int,
    random: np.random.Generator,
) -> list[list[int]]:
    """Sample one answer per prompt; returns prompt and answer ids, up to and with the end mark."""
    loaded = _load(model)
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    ids = np.full((len(prompts), int(lengths.max()) + new_tokens), eos_id, dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    caches = _empty_caches(loaded, *ids.shape)
    # Shorter prompts are padded on the right. What the padding leaves in the cache is never seen:
    # a query sees positions up to its own, and those are overwritten before they are reached.
    prefix = np.arange(lengths.max(), dtype=np.int64)[None].repeat(len(prompts), axis=0)
    states = _step(loaded, caches, ids[:, : lengths.max()], prefix)
    rows = np.arange(len(prompts))
    last = states[rows, lengths - 1]
    ended = np.zeros(len(prompts), dtype=np.bool_)
    for generated in range(new_tokens):
        sampled = _sample(last @ loaded.embedding.T, random)
        sampled[ended] = eos_id
        positions = lengths + generated
        ids[rows, positions] = sampled
        ended |= sampled == eos_id
        if ended.all():
            break
        last = _step(loaded, caches, sampled[:, None], positions[:, None])[:, 0]
    return [
        _until_end(row[: start + new_tokens], start, eos_id)
        for row, start in zip(ids, lengths.tolist(), strict=True)
    ]


def _load(model: DenseModel) -> _LoadedModel:
    return _LoadedModel(
        shape=model.shape,
        embedding=model.tensor("model.embed_tokens.weight"),
        final_norm=model.tensor("model.norm.weight"),
        layers=tuple(
            (load_attention(model.tensor, layer), load_ffn(model.tensor, layer))
            for layer in range(model.shape.layers)
        ),
    )


def _empty_caches(loaded: _LoadedModel, batch: int, tokens: int) -> list[KeyValues]:
    size = (batch, loaded.shape.kv_heads, tokens, loaded.shape.head_dim)
    return [
        KeyValues(np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32))
        for _ in loaded.layers
    ]


def _step(
    loaded: _LoadedModel, caches: list[KeyValues], ids: TokenIds, positions: TokenIds
) -> Matrix:
    """Feed ids [batch, tokens] at `positions`; returns final states [batch, tokens, hidden]."""
    shape = loaded.shape
    seen = int(positions.max()) + 1
    allowed = np.arange(seen)[None, None] <= positions[:, :, None]
    batch_index = np.arange(len(ids))[:, None]
    x = loaded.embedding[ids]
    for (attention, ffn), cache in zip(loaded.layers, caches, strict=True):
        queries, new = project_qkv(x, attention, shape, positions)
        # Advanced indices around a slice put the token axis before the heads.
        cache.keys[batch_index, :, positions] = new.keys.swapaxes(1, 2)
        cache.values[batch_index, :, positions] = new.values.swapaxes(1, 2)
        past = KeyValues(cache.keys[:, :, :seen], cache.values[:, :, :seen])
        x = x + linear(attend(queries, past, allowed), attention.o)
        normed = rms_norm(x, ffn.input_norm, shape.norm_epsilon)
        x = x + linear(ffn_activations(normed, ffn), ffn.down)
    return rms_norm(x, loaded.final_norm, shape.norm_epsilon)


def _sample(logits: Matrix, random: np.random.Generator) -> TokenIds:
    """Temperature and nucleus sampling, one id per row of [batch, vocabulary]."""
    count = min(_CANDIDATES, logits.shape[-1])
    candidates = np.argpartition(-logits, count - 1, axis=-1)[:, :count]
    by_rank = np.argsort(-np.take_along_axis(logits, candidates, axis=-1), axis=-1)
    order = np.take_along_axis(candidates, by_rank, axis=-1)
    ranked = softmax(np.take_along_axis(logits, order, axis=-1) / _TEMPERATURE)
    before = np.cumsum(ranked, axis=-1) - ranked
    ranked[before >= _TOP_P] = 0.0
    edges = np.cumsum(ranked, axis=-1, dtype=np.float64)
    draws = random.random((len(logits), 1)) * edges[:, -1:]
    # The first edge above the draw; a draw can round up to the last edge itself.
    chosen = np.minimum((edges <= draws).sum(axis=-1), np.count_nonzero(ranked, axis=-1) - 1)
    return np.take_along_axis(order, chosen[:, None], axis=-1)[:, 0]


def _until_end(ids: TokenIds, prompt_length: int, eos_id: int) -> list[int]:
    ends = np.flatnonzero(ids[prompt_length:] == eos_id)
    stop = prompt_length + int(ends[0]) + 1 if len(ends) else len(ids)
    return [int(token) for token in ids[:stop]]
