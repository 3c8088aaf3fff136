"""From a checkpoint's configuration and tensor names to what must be converted.

Nothing is read here but names, shapes and types: every complaint about a checkpoint comes before a
byte is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.model_config import ModelConfig, parse_model_config
from freetokend.ftw.contents import RouterSemantics
from freetokend.ftw.families import (
    EMBEDDING_NAME,
    FAMILIES,
    HEAD_NAME,
    Family,
    FusedExperts,
    Kind,
    Scope,
    SeparateExperts,
    TensorRule,
    When,
)
from freetokend.ftw.layout import ROW_MAJOR, ROWS16, BankSpec, TensorSpec, bf16_record_bytes
from freetokend.ftw.safetensors import SourceTensor

CONVERTIBLE_DTYPES: Final = ("BF16", "F16", "F32")
_MAX_EXPERTS_COUNT: Final = 1_000_000
_SHOWN_COUNT: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """Rows first_row.. of a source tensor seen as a matrix [.., columns]."""

    tensor: SourceTensor
    first_row: int
    rows_count: int
    columns_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSource:
    """Where the three matrices of one expert come from."""

    gate: SourceRows
    up: SourceRows
    down: SourceRows


class ModelSource:
    """The tensors of a checkpoint, resolved against its family and accounted for.

    tensors: specification and origin of everything but the routed experts, in region order;
    consumed: every source tensor that has a use. ModelDataError names what is unknown, missing,
    left over, of the wrong shape or of a type that cannot be converted.
    """

    def __init__(
        self, config_values: Mapping[str, object], tensors: Mapping[str, SourceTensor]
    ) -> None:
        self.config: ModelConfig = parse_model_config(config_values)
        family = FAMILIES.get(self.config.architecture)
        if family is None:
            raise ModelDataError(
                f"config.json: {self.config.architecture} cannot be converted; known are "
                f"{', '.join(FAMILIES)}.",
                reason=Reason.MODEL_UNSUPPORTED,
            )
        if not self.config.moe_layer_indices:
            raise ModelDataError(
                "config.json: no layer of this model has routed experts; freetokend serves "
                "mixture-of-experts models only.",
                reason=Reason.MODEL_UNSUPPORTED,
            )
        experts_count = len(self.config.moe_layer_indices) * self.config.experts_per_layer_count
        if experts_count > _MAX_EXPERTS_COUNT:
            raise ModelDataError(
                f"config.json: {experts_count} experts are more than {_MAX_EXPERTS_COUNT}."
            )
        self._family: Family = family
        self._source = tensors
        self._sizes = _sizes(self.config)
        self._naming = self._expert_naming()
        self.consumed: set[str] = set()
        self.duplicate_head: SourceRows | None = None
        self.tensors: tuple[tuple[TensorSpec, SourceRows], ...] = tuple(self._place_all())
        self._check_experts()
        self._check_leftovers()

    def bank_spec(self) -> BankSpec:
        """What the planner needs to know of the experts."""
        config = self.config
        return BankSpec(
            format="bf16",
            record_bytes=bf16_record_bytes(config.hidden_size, config.expert_size),
            experts_per_layer_count=config.experts_per_layer_count,
            hidden_size=config.hidden_size,
            intermediate_size=config.expert_size,
            moe_layer_indices=config.moe_layer_indices,
            activation="silu",
        )

    def router_semantics(self) -> RouterSemantics:
        """How this model chooses its experts."""
        return RouterSemantics(
            scoring=self.config.router.scoring.value,
            selection="top_k",
            top_k_count=self.config.router.top_k,
            normalise=self.config.router.renormalise,
            weight_scale=self._family.weight_scale,
        )

    def expert(self, moe_layer_index: int, expert: int) -> ExpertSource:
        """Where an expert's matrices are (0-based within its layer)."""
        layer = self.config.moe_layer_indices[moe_layer_index]
        hidden, inner = self.config.hidden_size, self.config.expert_size
        match self._naming:
            case SeparateExperts(gate=gate, up=up, down=down):
                return ExpertSource(
                    gate=self._rows(gate.format(layer=layer, expert=expert), (inner, hidden)),
                    up=self._rows(up.format(layer=layer, expert=expert), (inner, hidden)),
                    down=self._rows(down.format(layer=layer, expert=expert), (hidden, inner)),
                )
            case FusedExperts(gate_up=gate_up, down=down):
                count = self.config.experts_per_layer_count
                both = self._rows(gate_up.format(layer=layer), (count, 2 * inner, hidden))
                downs = self._rows(down.format(layer=layer), (count, hidden, inner))
                return ExpertSource(
                    gate=_part(both, expert * 2 * inner, inner),
                    up=_part(both, expert * 2 * inner + inner, inner),
                    down=_part(downs, expert * hidden, hidden),
                )

    def _expert_naming(self) -> SeparateExperts | FusedExperts:
        layer = self.config.moe_layer_indices[0]
        for naming in self._family.experts:
            if naming.down.format(layer=layer, expert=0) in self._source:
                return naming
        return self._family.experts[0]

    def _place_all(self) -> Iterator[tuple[TensorSpec, SourceRows]]:
        for rule in self._family.rules:
            if rule.scope is Scope.MODEL:
                yield from self._place(rule, None)
        moe_layers = frozenset(self.config.moe_layer_indices)
        for layer in range(self.config.layers_count):
            absent = Scope.DENSE_LAYER if layer in moe_layers else Scope.MOE_LAYER
            for rule in self._family.rules:
                if rule.scope not in (Scope.MODEL, absent):
                    yield from self._place(rule, layer)

    def _place(
        self, rule: TensorRule, layer: int | None
    ) -> Iterator[tuple[TensorSpec, SourceRows]]:
        names = [name.format(layer=layer) for name in rule.names]
        shape = tuple(self._sizes[size] for size in rule.shape)
        if rule.when is When.UNTIED and self.config.tied_embeddings:
            if names[0] in self._source:
                # Some writers save the tied matrix twice; the converter compares the two.
                self.duplicate_head = self._rows(names[0], shape)
            return
        if rule.when is When.ATTENTION_BIAS and not self.config.attention_bias:
            return
        name = next((name for name in names if name in self._source), names[0])
        rows = self._rows(name, shape)
        dtype, layout = self._storage(rule.kind)
        yield TensorSpec(name=names[0], dtype=dtype, shape=shape, layout=layout), rows

    def _storage(self, kind: Kind) -> tuple[str, str]:
        match kind:
            case Kind.LINEAR:
                return "bf16", ROWS16
            case Kind.EMBEDDING:
                return "bf16", ROWS16 if self.config.tied_embeddings else ROW_MAJOR
            case Kind.VECTOR | Kind.ROUTER:
                return "f32", ROW_MAJOR

    def _rows(self, name: str, shape: tuple[int, ...]) -> SourceRows:
        tensor = self._source.get(name)
        if tensor is None:
            raise ModelDataError(
                f"the checkpoint lacks the tensor {name}, which {self.config.architecture} with "
                f"this config.json needs. Download it again, or correct config.json."
            )
        if tensor.shape != shape:
            raise ModelDataError(
                f"{tensor.file}: tensor {name} has the shape {list(tensor.shape)}; config.json "
                f"says {list(shape)}."
            )
        if tensor.dtype not in CONVERTIBLE_DTYPES:
            raise ModelDataError(
                f"{tensor.file}: tensor {name} is {tensor.dtype}; only "
                f"{', '.join(CONVERTIBLE_DTYPES)} can be converted.",
                reason=Reason.MODEL_UNSUPPORTED,
            )
        self.consumed.add(name)
        rows = 1
        for size in shape[:-1]:
            rows *= size
        return SourceRows(tensor=tensor, first_row=0, rows_count=rows, columns_count=shape[-1])

    def _check_experts(self) -> None:
        for moe_layer_index in range(len(self.config.moe_layer_indices)):
            for expert in range(self.config.experts_per_layer_count):
                self.expert(moe_layer_index, expert)

    def _check_leftovers(self) -> None:
        left = [
            name
            for name in self._source
            if name not in self.consumed
            and not any(pattern.fullmatch(name) for pattern in self._family.ignorable)
        ]
        if left:
            more = f" and {len(left) - _SHOWN_COUNT} more" if len(left) > _SHOWN_COUNT else ""
            raise ModelDataError(
                f"the checkpoint holds tensors that {self.config.architecture} with this "
                f"config.json has no use for: {', '.join(sorted(left)[:_SHOWN_COUNT])}{more}. "
                f"Leaving them out would change the model, so it is not converted."
            )


def _part(rows: SourceRows, first_row: int, rows_count: int) -> SourceRows:
    return SourceRows(
        tensor=rows.tensor,
        first_row=rows.first_row + first_row,
        rows_count=rows_count,
        columns_count=rows.columns_count,
    )


def _sizes(config: ModelConfig) -> dict[str, int]:
    """The names of sizes that rules use."""
    return {
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "head": config.head_size,
        "q_width": config.q_heads_count * config.head_size,
        "kv_width": config.kv_heads_count * config.head_size,
        "experts": config.experts_per_layer_count,
        "dense": config.dense_size,
    }


__all__ = [
    "CONVERTIBLE_DTYPES",
    "EMBEDDING_NAME",
    "HEAD_NAME",
    "ExpertSource",
    "ModelSource",
    "SourceRows",
]
