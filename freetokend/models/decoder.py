"""The decoder: embedding, layers around a wide residual stream, final norm and logits.

What differs between families is in `ModelConfig` and in the names of their modules. This module
only writes the step program down; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from freetokend.core.model_config import ModelConfig, ModelFamily
from freetokend.tensor.program import (
    Add,
    AddRmsNorm,
    Attend,
    Element,
    Embed,
    Experts,
    Glu,
    HeadNorm,
    Linear,
    Matrix,
    Product,
    ProgramBuilder,
    Rotate,
    Route,
    RouterProduct,
    Rows,
    SelectRows,
    StepProgram,
    Vector,
)

_EMBEDDING: Final = "model.embed_tokens.weight"
_MOE_MODULE: Final[Mapping[ModelFamily, str]] = MappingProxyType(
    {ModelFamily.MIXTRAL: "block_sparse_moe", ModelFamily.QWEN3_MOE: "mlp"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """The row buffers that every layer uses again. `delta`: what a block adds to the residual."""

    residual: int
    delta: int
    normed: int
    q: int
    k: int
    v: int
    attended: int


class _DecoderBuilder:
    """Writes the program of one ModelConfig."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._program = ProgramBuilder()
        new, hidden, head = self._program, config.hidden_size, config.head_size
        self._buffers = _Buffers(
            residual=new.wide(hidden),
            delta=new.wide(hidden),
            normed=new.activation(hidden),
            q=new.wide(config.q_heads_count * head),
            k=new.wide(config.kv_heads_count * head),
            v=new.wide(config.kv_heads_count * head),
            attended=new.activation(config.q_heads_count * head),
        )
        if config.moe_layer_indices:
            top_k = config.router.top_k
            self._scores = new.wide(config.experts_per_layer_count)
            self._ids = new.buffer(Element.INDEX, top_k)
            self._weights = new.wide(top_k)
        if len(config.moe_layer_indices) < config.layers_count:
            self._gate = new.wide(config.dense_size)
            self._up = new.wide(config.dense_size)
            self._inner = new.activation(config.dense_size)

    def build(self) -> StepProgram:
        config, buffers, program = self._config, self._buffers, self._program
        table = Matrix(
            name=_EMBEDDING, out_features=config.vocab_size, in_features=config.hidden_size
        )
        program.append(Embed(table=table, out=buffers.residual))
        for layer_index in range(config.layers_count):
            # The sum of the layer before is taken together with this layer's norm.
            self._attention(layer_index, delta=buffers.delta if layer_index else None)
            self._feed_forward(layer_index)
        program.append(Add(residual=buffers.residual, delta=buffers.delta))
        last = program.wide(config.hidden_size, Rows.OUTPUTS)
        normed = program.activation(config.hidden_size, Rows.OUTPUTS)
        logits = program.wide(config.vocab_size, Rows.OUTPUTS)
        output = Matrix(
            name=_EMBEDDING if config.tied_embeddings else "lm_head.weight",
            out_features=config.vocab_size,
            in_features=config.hidden_size,
            shared=config.tied_embeddings,
        )
        program.append(
            SelectRows(x=buffers.residual, out=last),
            AddRmsNorm(
                residual=last,
                delta=None,
                weight=Vector(name="model.norm.weight", size=config.hidden_size),
                eps=config.norm_epsilon,
                out=normed,
            ),
            Linear(x=normed, products=(Product(weight=output, bias=None, out=logits),)),
        )
        return program.build(logits)

    def _norm(self, name: str, delta: int | None) -> AddRmsNorm:
        """delta joins the residual stream, whose norm is taken."""
        return AddRmsNorm(
            residual=self._buffers.residual,
            delta=delta,
            weight=Vector(name=f"{name}.weight", size=self._config.hidden_size),
            eps=self._config.norm_epsilon,
            out=self._buffers.normed,
        )

    def _product(self, name: str, x: int, out: int, *, bias: bool = False) -> Product:
        """The matrix of the module `name`, from the columns of buffer x to those of `out`."""
        out_features = self._program.width(out)
        return Product(
            weight=Matrix(
                name=f"{name}.weight",
                out_features=out_features,
                in_features=self._program.width(x),
            ),
            bias=Vector(name=f"{name}.bias", size=out_features) if bias else None,
            out=out,
        )

    def _attention(self, layer_index: int, *, delta: int | None) -> None:
        """delta = attention(norm(residual)): grouped queries, rotary positions, head norms."""
        config, buffers, program = self._config, self._buffers, self._program
        layer = f"model.layers.{layer_index}"
        name, bias = f"{layer}.self_attn", config.attention_bias
        x, head_size = buffers.normed, config.head_size
        program.append(
            self._norm(f"{layer}.input_layernorm", delta),
            Linear(
                x=x,
                products=(
                    self._product(f"{name}.q_proj", x, buffers.q, bias=bias),
                    self._product(f"{name}.k_proj", x, buffers.k, bias=bias),
                    self._product(f"{name}.v_proj", x, buffers.v, bias=bias),
                ),
            ),
        )
        if config.qk_norm:
            for buffer, norm in ((buffers.q, "q_norm"), (buffers.k, "k_norm")):
                weight = Vector(name=f"{name}.{norm}.weight", size=head_size)
                program.append(HeadNorm(x=buffer, weight=weight, eps=config.norm_epsilon))
        output = self._product(f"{name}.o_proj", buffers.attended, buffers.delta, bias=bias)
        program.append(
            Rotate(x=buffers.q, rope=config.rope, head_size=head_size),
            Rotate(x=buffers.k, rope=config.rope, head_size=head_size),
            Attend(
                layer_index=layer_index,
                q=buffers.q,
                k=buffers.k,
                v=buffers.v,
                head_size=head_size,
                scale=head_size**-0.5,
                out=buffers.attended,
            ),
            Linear(x=buffers.attended, products=(output,)),
        )

    def _feed_forward(self, layer_index: int) -> None:
        """delta = feed_forward(norm(residual + delta)): routed experts, or one dense SwiGLU."""
        layer = f"model.layers.{layer_index}"
        self._program.append(self._norm(f"{layer}.post_attention_layernorm", self._buffers.delta))
        if layer_index in self._config.moe_layer_indices:
            module = _MOE_MODULE[self._config.family]
            self._moe(f"{layer}.{module}", self._config.moe_layer_indices.index(layer_index))
        else:
            self._dense(f"{layer}.mlp")

    def _moe(self, name: str, moe_layer_index: int) -> None:
        config, buffers = self._config, self._buffers
        gate = Matrix(
            name=f"{name}.gate.weight",
            out_features=config.experts_per_layer_count,
            in_features=config.hidden_size,
        )
        self._program.append(
            RouterProduct(x=buffers.normed, weight=gate, out=self._scores),
            Route(logits=self._scores, router=config.router, ids=self._ids, weights=self._weights),
            Experts(
                moe_layer_index=moe_layer_index,
                x=buffers.normed,
                ids=self._ids,
                weights=self._weights,
                out=buffers.delta,
            ),
        )

    def _dense(self, name: str) -> None:
        buffers, x = self._buffers, self._buffers.normed
        self._program.append(
            Linear(
                x=x,
                products=(
                    self._product(f"{name}.gate_proj", x, self._gate),
                    self._product(f"{name}.up_proj", x, self._up),
                ),
            ),
            Glu(gate=self._gate, up=self._up, out=self._inner),
            Linear(
                x=self._inner,
                products=(self._product(f"{name}.down_proj", self._inner, buffers.delta),),
            ),
        )


def decoder_program(config: ModelConfig) -> StepProgram:
    """The step program of a decoder with the residual stream in the wide dtype:
    x + attention(norm(x)), then x + feed_forward(norm(x)), per layer."""
    return _DecoderBuilder(config).build()
