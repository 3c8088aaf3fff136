"""From a checkpoint's configuration and tensor names to what must be converted.

Nothing is read here but names, shapes and types: every complaint about a checkpoint comes before a
byte is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from freetokend.core.deepseek_v4_config import AttentionKind
from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.model_config import ModelConfig, parse_model_config
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.contents import RouterSemantics
from freetokend.ftw.families import (
    FAMILIES,
    ExpertNaming,
    Family,
    FusedExperts,
    InterleavedExperts,
    Kind,
    Scope,
    SeparateExperts,
    TensorRule,
    When,
)
from freetokend.ftw.formats import BF16, WeightFormat, record_layout
from freetokend.ftw.layout import ROW_MAJOR, ROWS16, BankSpec, TensorSpec
from freetokend.ftw.matrix import MatrixSource
from freetokend.ftw.rule_sizes import rule_sizes
from freetokend.ftw.safetensors import SourceTensor
from freetokend.ftw.schemes.gpt_oss import GptOssScheme
from freetokend.ftw.schemes.scheme import Scheme
from freetokend.ftw.sources import (
    ID_DTYPES,
    DequantisedMatrix,
    IdTable,
    PlainMatrix,
    PlainVector,
    QuantisedMatrix,
    TransposedMatrix,
    VectorSource,
)

CONVERTIBLE_DTYPES: Final = ("BF16", "F16", "F32")
_MAX_EXPERTS_COUNT: Final = 1_000_000
_SHOWN_COUNT: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The formats that routed experts and other linear layers are to get; None: as they come."""

    experts: WeightFormat | None = None
    dense: WeightFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSource:
    """Where the three matrices of one expert come from, and what is added to their products."""

    gate: MatrixSource
    up: MatrixSource
    down: MatrixSource
    biases: tuple[VectorSource, VectorSource, VectorSource] | None = None


class ModelSource:
    """The tensors of a checkpoint, resolved against its family and accounted for.

    tensors: specification and origin of everything but the routed experts, in region order;
    consumed: every source tensor that has a use; ignored: those that nothing computes with;
    quantised_dense: names of tensors that are brought into another format on the way;
    duplicate_head: output projection and embedding as bf16 where both were saved though they are
    one; experts_from: format of the experts in the checkpoint. ModelDataError names what is
    unknown, missing, left over, of the wrong shape, of a type that cannot be converted, or of a
    width that the format wanted does not have.
    """

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, wanted: Wanted) -> None:
        self.config: ModelConfig = parse_model_config(checkpoint.config)
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
        self._checkpoint = checkpoint
        self._scheme = scheme
        self._wanted = wanted
        self._plain: set[str] = set()
        self._is_quantised = False
        self._sizes = rule_sizes(self.config)
        self._moe_layers = frozenset(self.config.moe_layer_indices)
        self._naming = self._expert_naming()
        self._embedding = self._found(family.embedding, None)
        self.duplicate_head: tuple[MatrixSource, MatrixSource] | None = None
        self.quantised_dense: set[str] = set()
        self.tensors: tuple[tuple[TensorSpec, MatrixSource | IdTable], ...] = tuple(
            self._place_all()
        )
        self.experts_from, self._format = self._check_experts()
        self.ignored = self._check_leftovers()

    @property
    def consumed(self) -> set[str]:
        """Names, as the files have them, of all source tensors that were used."""
        return self._plain | self._scheme.consumed

    @property
    def scheme_name(self) -> str:
        """Of what the matrices are quantised in; "none" when they are plain, whatever is said."""
        return self._scheme.name if self._is_quantised else "none"

    @property
    def requantises(self) -> bool:
        """Whether experts or other linear layers change their format on the way."""
        return self._format != self.experts_from or bool(self.quantised_dense)

    def bank_spec(self) -> BankSpec:
        """What the planner needs to know of the experts."""
        config = self.config
        layout = record_layout(
            self._format, config.hidden_size, config.expert_size, has_bias=config.expert_bias
        )
        return BankSpec(
            format=str(self._format),
            record_bytes=layout.record_bytes,
            experts_per_layer_count=config.experts_per_layer_count,
            hidden_size=config.hidden_size,
            intermediate_size=config.expert_size,
            moe_layer_indices=config.moe_layer_indices,
            activation=config.activation.value,
            activation_limit=config.activation_limit,
            activation_alpha=config.activation_alpha,
            has_bias=config.expert_bias,
        )

    def router_semantics(self) -> RouterSemantics:
        """How this model chooses its experts."""
        return RouterSemantics(
            scoring=self.config.router.scoring.value,
            selection=self.config.router.selection.value,
            top_k_count=self.config.router.top_k,
            normalise=self.config.router.renormalise,
            weight_scale=self.config.router.weight_scale,
        )

    def expert(self, moe_layer_index: int, expert: int) -> ExpertSource:
        """Where an expert's matrices are (0-based within its layer), in the bank's format."""
        found = self._expert(moe_layer_index, expert)
        gate, up, down = (
            self._in_format(matrix, self._wanted.experts, "--quantize")
            for matrix in (found.gate, found.up, found.down)
        )
        return ExpertSource(gate=gate, up=up, down=down, biases=found.biases)

    def _expert(self, moe_layer_index: int, expert: int) -> ExpertSource:
        """The expert as the checkpoint has it."""
        layer = self.config.moe_layer_indices[moe_layer_index]
        hidden, inner = self.config.hidden_size, self.config.expert_size
        match self._naming:
            case SeparateExperts(gate=gate, up=up, down=down):
                return ExpertSource(
                    gate=self._matrix(gate.format(layer=layer, expert=expert), (inner, hidden)),
                    up=self._matrix(up.format(layer=layer, expert=expert), (inner, hidden)),
                    down=self._matrix(down.format(layer=layer, expert=expert), (hidden, inner)),
                )
            case FusedExperts(gate_up=gate_up, down=down):
                count = self.config.experts_per_layer_count
                both = self._rows(gate_up.format(layer=layer), (count, 2 * inner, hidden))
                downs = self._rows(down.format(layer=layer), (count, hidden, inner))
                return ExpertSource(
                    gate=both.part(expert * 2 * inner, inner),
                    up=both.part(expert * 2 * inner + inner, inner),
                    down=downs.part(expert * hidden, hidden),
                )
            case InterleavedExperts(prefix=prefix):
                return self._interleaved_expert(prefix.format(layer=layer), expert)

    def _interleaved_expert(self, prefix: str, expert: int) -> ExpertSource:
        """An expert of gpt-oss, in mxfp4 or plain."""
        config = self.config
        count, hidden, inner = (
            config.experts_per_layer_count,
            config.hidden_size,
            config.expert_size,
        )
        if isinstance(self._scheme, GptOssScheme) and self._scheme.has_expert(prefix):
            self._is_quantised = True
            found = self._scheme.expert(prefix, expert, experts=count, hidden=hidden, inner=inner)
            return ExpertSource(
                gate=found.gate,
                up=found.up,
                down=found.down,
                biases=(found.gate_bias, found.up_bias, found.down_bias),
            )
        both = self._rows(prefix + "gate_up_proj", (count, hidden, 2 * inner))
        both = both.part(expert * hidden, hidden)
        down = self._rows(prefix + "down_proj", (count, inner, hidden)).part(expert * inner, inner)
        bias = self._rows(prefix + "gate_up_proj_bias", (count, 2 * inner)).part(expert, 1)
        return ExpertSource(
            gate=TransposedMatrix(matrix=both, first=0, step=2, rows_count=inner),
            up=TransposedMatrix(matrix=both, first=1, step=2, rows_count=inner),
            down=TransposedMatrix(matrix=down, first=0, step=1, rows_count=hidden),
            biases=(
                PlainVector(matrix=bias, first=0, step=2),
                PlainVector(matrix=bias, first=1, step=2),
                PlainVector(
                    matrix=self._rows(prefix + "down_proj_bias", (count, hidden)).part(expert, 1)
                ),
            ),
        )

    def _expert_naming(self) -> ExpertNaming:
        layer = self.config.moe_layer_indices[0]
        for naming in self._family.experts:
            if isinstance(naming, InterleavedExperts):
                return naming
            if self._scheme.has(naming.down.format(layer=layer, expert=0)):
                return naming
        return self._family.experts[0]

    def _place_all(self) -> Iterator[tuple[TensorSpec, MatrixSource | IdTable]]:
        for rule in self._family.rules:
            if rule.scope is Scope.MODEL:
                yield from self._place(rule, None)
        for layer in range(self.config.layers_count):
            for rule in self._family.rules:
                if rule.scope is not Scope.MODEL and self._occurs(rule.scope, layer):
                    yield from self._place(rule, layer)

    def _occurs(self, scope: Scope, layer: int) -> bool:
        """Whether tensors of this scope exist in a layer."""
        special = self.config.deepseek_v4
        match scope:
            case Scope.MOE_LAYER:
                return layer in self._moe_layers
            case Scope.DENSE_LAYER:
                return layer not in self._moe_layers
            case Scope.SPARSE_LAYER:
                return special is not None and special.attention[layer] is AttentionKind.SPARSE
            case Scope.HEAVY_LAYER:
                return special is not None and special.attention[layer] is AttentionKind.HEAVY
            case Scope.HASH_LAYER:
                return special is not None and layer in special.hash_layer_indices
            case Scope.SCORED_LAYER:
                return special is not None and layer not in special.hash_layer_indices
            case _:
                return True

    def _place(
        self, rule: TensorRule, layer: int | None
    ) -> Iterator[tuple[TensorSpec, MatrixSource | IdTable]]:
        if rule.when is When.ATTENTION_BIAS and not self.config.attention_bias:
            return
        shape = tuple(self._sizes[size] for size in rule.shape)
        indexed = rule.names[0].format(layer=layer)
        name = self._found(rule, layer)
        if rule.when is When.UNTIED and self.config.tied_embeddings:
            yield from self._place_tied(indexed, name, shape)
            return
        match rule.kind:
            case Kind.LINEAR:
                matrix = self._in_format(
                    self._matrix(name, shape), self._wanted.dense, "--quantize-dense"
                )
                yield self._linear(indexed, shape, matrix)
            case Kind.EMBEDDING:
                embedding = self._in_format(self._matrix(name, shape), BF16, "")
                # One matrix serves both ends of the model if it may be bf16 at both.
                shared = self.config.tied_embeddings and self._tied_head(shape).format == BF16
                layout = ROWS16 if shared else ROW_MAJOR
                spec = TensorSpec(name=indexed, dtype="bf16", shape=shape, layout=layout)
                yield spec, embedding
            case Kind.VECTOR | Kind.ROUTER | Kind.EXACT:
                spec = TensorSpec(name=indexed, dtype="f32", shape=shape, layout=ROW_MAJOR)
                yield spec, self._rows(name, shape)
            case Kind.IDS:
                spec = TensorSpec(name=indexed, dtype="i32", shape=shape, layout=ROW_MAJOR)
                yield (
                    spec,
                    IdTable(
                        checkpoint=self._checkpoint,
                        tensor=self._plain_tensor(name, shape, ID_DTYPES),
                        ids_count=self.config.experts_per_layer_count,
                    ),
                )

    def _found(self, rule: TensorRule, layer: int | None) -> str:
        """What the checkpoint calls a tensor; the first name when it lacks it."""
        names = [name.format(layer=layer) for name in rule.names]
        return next((name for name in names if self._scheme.has(name)), names[0])

    def _place_tied(
        self, indexed: str, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[TensorSpec, MatrixSource]]:
        """The output projection of a model that ties it to the embedding."""
        if self._scheme.has(name):
            # Some writers save the tied matrix twice; the converter compares the two.
            head, embedding = (
                self._in_format(self._matrix(one, shape), BF16, "")
                for one in (name, self._embedding)
            )
            self.duplicate_head = (head, embedding)
        tied = self._tied_head(shape)
        if tied.format != BF16:
            yield self._linear(indexed, shape, tied)

    def _tied_head(self, shape: tuple[int, ...]) -> MatrixSource:
        """The output projection of a model that ties it to the embedding."""
        embedding = self._matrix(self._embedding, shape)
        return self._in_format(embedding, self._wanted.dense, "--quantize-dense")

    def _linear(
        self, name: str, shape: tuple[int, ...], matrix: MatrixSource
    ) -> tuple[TensorSpec, MatrixSource]:
        if isinstance(matrix, QuantisedMatrix):
            self.quantised_dense.add(name)
        return TensorSpec(name=name, dtype=str(matrix.format), shape=shape, layout=ROWS16), matrix

    def _in_format(
        self, matrix: MatrixSource, wanted: WeightFormat | None, option: str
    ) -> MatrixSource:
        """`matrix` brought into the format, itself when it has it already or none is wanted."""
        if wanted is None or matrix.format == wanted:
            return matrix
        if matrix.columns_count % wanted.column_multiple:
            raise ModelDataError(
                f"tensor {matrix.name}: its width {matrix.columns_count} is not a multiple of "
                f"{wanted.column_multiple}, the block of {wanted}. Choose another format for "
                f"{option}.",
                reason=Reason.MODEL_UNSUPPORTED,
            )
        values = (
            matrix
            if isinstance(matrix, PlainMatrix | TransposedMatrix)
            else DequantisedMatrix(matrix=matrix)
        )
        return QuantisedMatrix(values, wanted)

    def _matrix(self, name: str, shape: tuple[int, ...]) -> MatrixSource:
        """The matrix as the checkpoint has it, quantised or plain."""
        rows, columns = shape
        found = self._scheme.matrix(name, rows, columns)
        if found is None:
            return self._rows(name, shape)
        self._is_quantised |= found.format != BF16
        return found

    def _rows(self, name: str, shape: tuple[int, ...]) -> PlainMatrix:
        return PlainMatrix(
            checkpoint=self._checkpoint,
            tensor=self._plain_tensor(name, shape, CONVERTIBLE_DTYPES),
            first_row=0,
            rows_count=prod(shape[:-1]),
            columns_count=shape[-1],
        )

    def _plain_tensor(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
    ) -> SourceTensor:
        """The tensor of this shape and of one of the types, counted as used."""
        tensor = self._scheme.tensor(name)
        if tensor is None and self._scheme.has(name):
            raise ModelDataError(
                f"the tensor {name} is quantised; routers and norms are only taken in "
                f"{', '.join(CONVERTIBLE_DTYPES)}.",
                reason=Reason.MODEL_UNSUPPORTED,
            )
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
        if tensor.dtype not in dtypes:
            raise ModelDataError(
                f"{tensor.file}: tensor {name} is {tensor.dtype}; as plain numbers only "
                f"{', '.join(dtypes)} can be converted, and no quantised form that is known has "
                f"this type here (docs/models.md lists them).",
                reason=Reason.MODEL_UNSUPPORTED,
            )
        self._plain.add(tensor.name)
        return tensor

    def _check_experts(self) -> tuple[WeightFormat, WeightFormat]:
        """The experts' format in the checkpoint and in the bank, having looked at all of them."""
        first = self._expert(0, 0).gate
        wanted = self._wanted.experts or first.format
        for moe_layer_index in range(len(self.config.moe_layer_indices)):
            for expert in range(self.config.experts_per_layer_count):
                source = self.expert(moe_layer_index, expert)
                for matrix in (source.gate, source.up, source.down):
                    if matrix.format != wanted:
                        raise ModelDataError(
                            f"tensor {matrix.name} is {matrix.format} and {first.name} is "
                            f"{wanted}; all routed experts must have one format. Give --quantize "
                            f"to convert them into one.",
                            reason=Reason.MODEL_UNSUPPORTED,
                        )
        return first.format, wanted

    def _check_leftovers(self) -> tuple[str, ...]:
        """Names of tensors that may be left out; ModelDataError when others are left."""
        consumed = self.consumed
        left: list[str] = []
        ignored: list[str] = []
        for name in self._checkpoint.tensors:
            if name in consumed or self._scheme.ignorable(name):
                continue
            may_go = any(pattern.fullmatch(name) for pattern in self._family.ignorable)
            (ignored if may_go else left).append(name)
        if left:
            more = f" and {len(left) - _SHOWN_COUNT} more" if len(left) > _SHOWN_COUNT else ""
            raise ModelDataError(
                f"the checkpoint holds tensors that {self.config.architecture} with this "
                f"config.json has no use for: {', '.join(sorted(left)[:_SHOWN_COUNT])}{more}. "
                f"Leaving them out would change the model, so it is not converted."
            )
        return tuple(sorted(ignored))


__all__ = [
    "CONVERTIBLE_DTYPES",
    "ExpertSource",
    "ModelSource",
    "Wanted",
]
