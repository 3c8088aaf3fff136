"""The decoder: embedding, layers around a wide residual stream, final norm and logits.

What differs between families is in `ModelConfig` and in the names of their modules. This module
only writes the step program down; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from freetokend.core.errors import InternalError
from freetokend.core.model_config import ModelConfig
from freetokend.core.model_families import ModelFamily
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
    """The row buffers that every layer uses again for attention."""

    q: int
    k: int
    v: int
    attended: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """The residual stream of some rows, and what feeds forward. `delta`: what a block adds to it.

    MoE layers use `scores`, `ids` and `weights`, dense ones `gate`, `up` and `inner`; None in a
    model without such layers.
    """

    residual: int
    delta: int
    normed: int
    scores: int | None
    ids: int | None
    weights: int | None
    gate: int | None
    up: int | None
    inner: int | None


class _DecoderBuilder:
    """Writes the program of one ModelConfig."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._program = ProgramBuilder()
        new, head = self._program, config.head_size
        self._tokens = self._stream(Rows.TOKENS)
        self._buffers = _Buffers(
            q=new.wide(config.q_heads_count * head),
            k=new.wide(config.kv_heads_count * head),
            v=new.wide(config.kv_heads_count * head),
            attended=new.activation(config.q_heads_count * head),
        )

    def _stream(self, rows: Rows) -> _Stream:
        config, new = self._config, self._program
        moe = bool(config.moe_layer_indices)
        dense = len(config.moe_layer_indices) < config.layers_count
        top_k = config.router.top_k
        return _Stream(
            residual=new.wide(config.hidden_size, rows),
            delta=new.wide(config.hidden_size, rows),
            normed=new.activation(config.hidden_size, rows),
            scores=new.wide(config.experts_per_layer_count, rows) if moe else None,
            ids=new.buffer(Element.INDEX, top_k, rows) if moe else None,
            weights=new.wide(top_k, rows) if moe else None,
            gate=new.wide(config.dense_size, rows) if dense else None,
            up=new.wide(config.dense_size, rows) if dense else None,
            inner=new.activation(config.dense_size, rows) if dense else None,
        )

    def build(self) -> StepProgram:
        config, tokens, program = self._config, self._tokens, self._program
        table = Matrix(
            name=_EMBEDDING, out_features=config.vocab_size, in_features=config.hidden_size
        )
        program.append(Embed(table=table, out=tokens.residual))
        for layer_index in range(config.layers_count):
            # The sum of the layer before is taken together with this layer's norm.
            self._attention(layer_index, delta=tokens.delta if layer_index else None)
            if layer_index + 1 < config.layers_count:
                self._feed_forward(layer_index, tokens, delta=tokens.delta)
        # Behind the last attention nobody reads the rows that want no logits.
        outputs = self._stream(Rows.OUTPUTS)
        program.append(
            Add(residual=tokens.residual, delta=tokens.delta),
            SelectRows(x=tokens.residual, out=outputs.residual),
        )
        self._feed_forward(config.layers_count - 1, outputs, delta=None)
        logits = program.wide(config.vocab_size, Rows.OUTPUTS)
        output = Matrix(
            name=_EMBEDDING if config.tied_embeddings else "lm_head.weight",
            out_features=config.vocab_size,
            in_features=config.hidden_size,
            shared=config.tied_embeddings,
        )
        program.append(
            self._norm("model.norm", outputs, outputs.delta),
            Linear(x=outputs.normed, products=(Product(weight=output, bias=None, out=logits),)),
        )
        return program.build(logits)

    def _norm(self, name: str, stream: _Stream, delta: int | None) -> AddRmsNorm:
        """delta joins the residual stream, whose norm is taken."""
        return AddRmsNorm(
            residual=stream.residual,
            delta=delta,
            weight=Vector(name=f"{name}.weight", size=self._config.hidden_size),
            eps=self._config.norm_epsilon,
            out=stream.normed,
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
        x, head_size = self._tokens.normed, config.head_size
        program.append(
            self._norm(f"{layer}.input_layernorm", self._tokens, delta),
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
        output = self._product(f"{name}.o_proj", buffers.attended, self._tokens.delta, bias=bias)
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

    def _feed_forward(self, layer_index: int, stream: _Stream, *, delta: int | None) -> None:
        """delta = feed_forward(norm(residual + delta)): routed experts, or one dense SwiGLU."""
        layer = f"model.layers.{layer_index}"
        self._program.append(self._norm(f"{layer}.post_attention_layernorm", stream, delta))
        if layer_index in self._config.moe_layer_indices:
            module = _MOE_MODULE[self._config.family]
            self._moe(
                f"{layer}.{module}", self._config.moe_layer_indices.index(layer_index), stream
            )
        else:
            self._dense(f"{layer}.mlp", stream)

    def _moe(self, name: str, moe_layer_index: int, stream: _Stream) -> None:
        config = self._config
        scores, ids, weights = map(_there, (stream.scores, stream.ids, stream.weights))
        gate = Matrix(
            name=f"{name}.gate.weight",
            out_features=config.experts_per_layer_count,
            in_features=config.hidden_size,
        )
        self._program.append(
            RouterProduct(x=stream.normed, weight=gate, out=scores),
            Route(logits=scores, router=config.router, ids=ids, weights=weights),
            Experts(
                moe_layer_index=moe_layer_index,
                x=stream.normed,
                ids=ids,
                weights=weights,
                out=stream.delta,
            ),
        )

    def _dense(self, name: str, stream: _Stream) -> None:
        x = stream.normed
        gate, up, inner = map(_there, (stream.gate, stream.up, stream.inner))
        self._program.append(
            Linear(
                x=x,
                products=(
                    self._product(f"{name}.gate_proj", x, gate),
                    self._product(f"{name}.up_proj", x, up),
                ),
            ),
            Glu(gate=gate, up=up, out=inner),
            Linear(x=inner, products=(self._product(f"{name}.down_proj", inner, stream.delta),)),
        )


def _there(buffer: int | None) -> int:
    if buffer is None:
        raise InternalError("a layer of a kind that the model does not have")
    return buffer


def decoder_program(config: ModelConfig) -> StepProgram:
    """The step program of a decoder with the residual stream in the wide dtype:
    x + attention(norm(x)), then x + feed_forward(norm(x)), per layer."""
    return _DecoderBuilder(config).build()
