"""Walks the dense model layer by layer and derives each layer's router and its neurons' uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freetokend.demo.gguf_model import DenseModel, Matrix
from freetokend.demo.plan.format import UpcyclePlan
from freetokend.demo.plan.llama import (
    FfnWeights,
    TokenIds,
    add_window_attention,
    ffn_activations,
    load_attention,
    load_ffn,
    perplexity,
    rms_norm,
)
from freetokend.demo.plan.router import balanced_clusters, expert_weights, fit_router
from freetokend.demo.wheels import Progress


@dataclass(frozen=True)
class LayerCalibration:
    """What calibration learns about one layer."""

    router: Matrix  # [experts, hidden]
    usefulness: Matrix  # [experts, neurons]: mean output energy for the tokens an expert sees


def calibrate(
    model: DenseModel,
    windows: TokenIds,
    experts: int,
    top_k: int,
    random: np.random.Generator,
    progress: Progress,
) -> list[LayerCalibration]:
    """Run the dense model over windows [windows, tokens]; one result per layer."""
    shape = model.shape
    x = model.tensor("model.embed_tokens.weight")[windows]
    layers = []
    for layer in range(shape.layers):
        x = add_window_attention(x, load_attention(model.tensor, layer), shape)
        ffn = load_ffn(model.tensor, layer)
        inputs = rms_norm(x, ffn.input_norm, shape.norm_epsilon).reshape(-1, shape.hidden)
        activations = ffn_activations(inputs, ffn)
        labels = balanced_clusters(inputs, experts, random)
        router = fit_router(inputs, labels, experts, random)
        weights = expert_weights(inputs, router, top_k)
        layers.append(LayerCalibration(router, _usefulness(activations, ffn, weights)))
        x = x + (activations @ ffn.down.T).reshape(x.shape)
        agreement = ((inputs @ router.T).argmax(axis=-1) == labels).mean()
        load = (weights > 0).mean(axis=0) * experts / top_k
        progress(
            f"layer {layer}: the router agrees with {agreement:.0%} of the clusters; "
            f"expert load {load.min():.2f}..{load.max():.2f} of an equal share"
        )
    return layers


def _usefulness(activations: Matrix, ffn: FfnWeights, weights: Matrix) -> Matrix:
    """Mean of (activation * length of its output column)^2, weighted by routing."""
    energy = np.square(activations * np.linalg.norm(ffn.down, axis=0))
    shares = weights.sum(axis=0)[:, None]
    # An expert that no token chose keeps score 0 for every neuron.
    usefulness: Matrix = (weights.T @ energy) / np.maximum(shares, np.float32(1e-9))
    return usefulness


def choose_neurons(
    layers: Sequence[LayerCalibration], kept: int, alpha: float, top_k: int
) -> UpcyclePlan:
    """Every expert keeps its `kept` most useful neurons."""
    usefulness = np.stack([layer.usefulness for layer in layers])
    best = np.argsort(-usefulness, axis=-1, kind="stable")[..., :kept]
    keep = np.zeros(usefulness.shape, dtype=np.bool_)
    np.put_along_axis(keep, best, True, axis=-1)
    router = np.stack([layer.router for layer in layers]).astype(np.float16)
    return UpcyclePlan(router=router, keep=keep, alpha=alpha, top_k=top_k)


def plan_perplexity(
    model: DenseModel, plan: UpcyclePlan, windows: TokenIds, rolled_experts: int = 0
) -> float:
    """Perplexity of the model that the plan describes, computed on the dense weights.

    With `rolled_experts` every token goes to wrong experts: the negative control.
    """
    shape = model.shape
    x = model.tensor("model.embed_tokens.weight")[windows]
    for layer in range(shape.layers):
        x = add_window_attention(x, load_attention(model.tensor, layer), shape)
        ffn = load_ffn(model.tensor, layer)
        inputs = rms_norm(x, ffn.input_norm, shape.norm_epsilon).reshape(-1, shape.hidden)
        router = np.roll(plan.router[layer].astype(np.float32), rolled_experts, axis=0)
        scale = np.where(plan.keep[layer], 1.0, plan.alpha).astype(np.float32)
        neuron_scale = expert_weights(inputs, router, plan.top_k) @ scale
        activations = ffn_activations(inputs, ffn) * neuron_scale
        x = x + (activations @ ffn.down.T).reshape(x.shape)
    return perplexity(x, windows, model.tensor, shape)
