"""Perplexity of a Mixtral-layout checkpoint in numpy, read from its files alone.

`python -m tests.demo.mixtral_numpy DIR WHEEL WINDOWS ROLL...` prints JSON: perplexity on held-out
text by how far the expert numbers were rolled (0: as routed, 1: every token goes to wrong experts).
A process of its own, so that one thread can be asked of BLAS before numpy is loaded: with two, its
workers spin against whatever else the machine does and a test takes seven times the CPU time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer

from freetokend.demo.gguf_model import ModelShape
from freetokend.demo.plan.llama import (
    add_window_attention,
    linear,
    load_attention,
    perplexity,
    rms_norm,
    silu,
)
from freetokend.demo.plan.wiki_text import read_text_sets

Matrix = NDArray[np.float32]


def measure(
    directory: Path, text_wheel: Path, windows: int, rolls: Sequence[int]
) -> dict[int, float]:
    """Perplexity by roll, from a process with one BLAS thread."""
    arguments = [str(directory), str(text_wheel), str(windows), *map(str, rolls)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {int(roll): value for roll, value in json.loads(done.stdout).items()}


class Checkpoint:
    """The files of a checkpoint, with the facts that a forward pass needs."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self._file = safe_open(directory / "model.safetensors", framework="np")
        self.shape = ModelShape(
            layers=self.config["num_hidden_layers"],
            hidden=self.config["hidden_size"],
            neurons=self.config["intermediate_size"],
            heads=self.config["num_attention_heads"],
            kv_heads=self.config["num_key_value_heads"],
            head_dim=self.config["head_dim"],
            vocabulary=self.config["vocab_size"],
            context_tokens=self.config["max_position_embeddings"],
            rope_theta=self.config["rope_theta"],
            norm_epsilon=self.config["rms_norm_eps"],
        )

    def tensor(self, name: str) -> Matrix:
        """A weight by name, as float32."""
        return self._file.get_tensor(name).astype(np.float32)


def routing(x: Matrix, gate: Matrix, top_k: int) -> Matrix:
    """Weight of every expert for every token [tokens, experts]; zero for those not chosen."""
    scores = linear(x, gate)
    probabilities = np.exp(scores - scores.max(axis=-1, keepdims=True))
    lowest_chosen = np.sort(probabilities, axis=-1)[:, -top_k][:, None]
    chosen = np.where(probabilities >= lowest_chosen, probabilities, np.float32(0))
    return chosen / chosen.sum(axis=-1, keepdims=True)


def moe_outputs(checkpoint: Checkpoint, layer: int, states: dict[int, Matrix]) -> dict[int, Matrix]:
    """The MoE block's output for normalised inputs [tokens, hidden], by roll."""
    prefix = f"model.layers.{layer}.block_sparse_moe."
    gate = checkpoint.tensor(prefix + "gate.weight")
    top_k = checkpoint.config["num_experts_per_tok"]
    weights = {roll: routing(x, np.roll(gate, roll, axis=0), top_k) for roll, x in states.items()}
    outputs = {roll: np.zeros_like(x) for roll, x in states.items()}
    for expert in range(checkpoint.config["num_local_experts"]):
        w1, w2, w3 = (
            checkpoint.tensor(f"{prefix}experts.{expert}.{name}.weight")
            for name in ("w1", "w2", "w3")
        )
        for roll, x in states.items():
            share = weights[roll][:, expert]
            tokens = np.flatnonzero(share)
            activations = silu(linear(x[tokens], w1)) * linear(x[tokens], w3)
            outputs[roll][tokens] += share[tokens, None] * linear(activations, w2)
    return outputs


def perplexities(
    checkpoint: Checkpoint, windows: NDArray[np.int64], rolls: Sequence[int]
) -> dict[int, float]:
    """Perplexity on windows [windows, tokens] by roll; the weights are read once for all."""
    shape = checkpoint.shape
    embedded = checkpoint.tensor("model.embed_tokens.weight")[windows]
    streams = dict.fromkeys(rolls, embedded)
    for layer in range(shape.layers):
        attention = load_attention(checkpoint.tensor, layer)
        norm = checkpoint.tensor(f"model.layers.{layer}.post_attention_layernorm.weight")
        streams = {roll: add_window_attention(x, attention, shape) for roll, x in streams.items()}
        inputs = {
            roll: rms_norm(x, norm, shape.norm_epsilon).reshape(-1, shape.hidden)
            for roll, x in streams.items()
        }
        for roll, output in moe_outputs(checkpoint, layer, inputs).items():
            streams[roll] = streams[roll] + output.reshape(embedded.shape)
    return {roll: perplexity(x, windows, checkpoint.tensor, shape) for roll, x in streams.items()}


def main(directory: str, text_wheel: str, windows: str, *rolls: str) -> None:
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    text = read_text_sets(Path(text_wheel), tokenizer, 0, int(windows))
    checkpoint = Checkpoint(Path(directory))
    print(json.dumps(perplexities(checkpoint, text.held_out_wiki, [int(roll) for roll in rolls])))


if __name__ == "__main__":
    main(*sys.argv[1:])
