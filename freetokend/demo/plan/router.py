"""Finds token clusters in FFN inputs and fits a linear router that tells them apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetokend.demo.gguf_model import Matrix
from freetokend.demo.plan.llama import softmax

Labels = NDArray[np.int64]

_CLUSTER_ROUNDS = 25
_BALANCE_STEP = 0.02

_FIT_STEPS = 120
_FIT_BATCH = 2048
_FIT_RATE = 0.02
_FIT_RATE_LATE = 0.005
_FIT_LATE_FROM = 80
_WEIGHT_DECAY = 1e-3
_LABEL_SMOOTHING = 0.05
_ADAM_MEAN_DECAY, _ADAM_SQUARE_DECAY, _ADAM_EPSILON = 0.9, 0.999, 1e-8


def balanced_clusters(x: Matrix, clusters: int, random: np.random.Generator) -> Labels:
    """Spherical k-means of inputs [tokens, hidden] with clusters of similar size.

    A bias per cluster rises while it is too small and falls while it is too large, as in
    loss-free load balancing: without it one expert gets most tokens.
    """
    points = _unit_rows(x - x.mean(axis=0))
    centres = points[random.permutation(len(points))[:clusters]].copy()
    bias = np.zeros(len(centres), dtype=np.float32)
    labels: Labels = np.zeros(len(points), dtype=np.int64)
    for _ in range(_CLUSTER_ROUNDS):
        labels = (points @ _unit_rows(centres).T + bias).argmax(axis=-1)
        sizes = np.bincount(labels, minlength=clusters)
        relative = sizes / len(points) * clusters
        bias += (_BALANCE_STEP * np.clip(1.0 - relative, -1.0, 1.0)).astype(np.float32)
        for cluster in np.flatnonzero(sizes):
            centres[cluster] = points[labels == cluster].mean(axis=0)
    return labels


def fit_router(x: Matrix, labels: Labels, experts: int, random: np.random.Generator) -> Matrix:
    """Softmax regression from inputs [tokens, hidden] to labels: router [experts, hidden]."""
    router = np.zeros((experts, x.shape[1]), dtype=np.float32)
    mean: Matrix = np.zeros_like(router)
    square: Matrix = np.zeros_like(router)
    targets = np.full((len(x), experts), _LABEL_SMOOTHING / experts, dtype=np.float32)
    targets[np.arange(len(x)), labels] += 1.0 - _LABEL_SMOOTHING
    for step in range(1, _FIT_STEPS + 1):
        batch = random.integers(0, len(x), _FIT_BATCH)
        error = softmax(x[batch] @ router.T) - targets[batch]
        gradient: Matrix = error.T @ x[batch] / len(batch) + _WEIGHT_DECAY * router
        mean = _ADAM_MEAN_DECAY * mean + (1 - _ADAM_MEAN_DECAY) * gradient
        square = _ADAM_SQUARE_DECAY * square + (1 - _ADAM_SQUARE_DECAY) * gradient * gradient
        mean_now = mean / (1 - _ADAM_MEAN_DECAY**step)
        square_now = square / (1 - _ADAM_SQUARE_DECAY**step)
        rate = _FIT_RATE if step <= _FIT_LATE_FROM else _FIT_RATE_LATE
        router -= rate * mean_now / (np.sqrt(square_now) + _ADAM_EPSILON)
    return router


def expert_weights(x: Matrix, router: Matrix, top_k: int) -> Matrix:
    """Mixtral's routing as a dense matrix [tokens, experts].

    Softmax over the top_k scores of each token; zero for the other experts.
    """
    scores = x @ router.T
    chosen = np.argpartition(-scores, top_k - 1, axis=-1)[:, :top_k]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, softmax(np.take_along_axis(scores, chosen, -1)), axis=-1)
    return weights


def _unit_rows(x: Matrix) -> Matrix:
    norms = np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-12))
    unit: Matrix = x / norms
    return unit
