"""The step program: a model as a flat list of operations over numbered row buffers.

`models` builds a program once; a runner binds it to weights and executes it each step: op by op in
torch (`torch_program`), or whole, from token ids to token ids, in one native call
(`native_program`). A new model family adds ops, not runners' control flow.

A buffer holds one row per token of the step, or per token that wants logits, and is reused by
every layer. Ops read and write whole buffers, in list order. Weights are named as in the
checkpoint, with the shape that config.json asks for; runners check names, shapes and leftovers.
"Wide" is fp32 (fp64 in a fp64 run), an activation is bf16 when serving: see the numerics contract
in `protocols`. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from freetokend.core.errors import InternalError
from freetokend.core.model_config import RouterConfig
from freetokend.core.rope_config import RopeConfig


class Rows(StrEnum):
    """What a buffer has one row of."""

    TOKENS = "tokens"
    OUTPUTS = "outputs"


class Element(StrEnum):
    """WIDE: fp32, the dtype of sums; ACTIVATION: bf16; INDEX: int32."""

    WIDE = "wide"
    ACTIVATION = "activation"
    INDEX = "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """[rows, width] elements."""

    rows: Rows
    element: Element
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A weight [out_features, in_features] by its checkpoint name (with suffix).

    `shared`: the same tensor as an earlier Embed's table (tied embeddings).
    """

    name: str
    out_features: int
    in_features: int
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """A weight [size] by its checkpoint name (with suffix)."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """out[t] = table[token_ids[t]], widened."""

    table: Matrix
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """residual += delta."""

    residual: int
    delta: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRmsNorm:
    """residual += delta (unless None); out = residual / sqrt(mean(residual^2) + eps) * weight."""

    residual: int
    delta: int | None
    weight: Vector
    eps: float
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One matrix of a Linear: out = x W^T (+ bias)."""

    weight: Matrix
    bias: Vector | None
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Several matrices over one activation: activation [., in] -> wide [., out] each."""

    x: int
    products: tuple[Product, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMS norm of each head of x in place, rounded to the activation dtype; weight [head size]."""

    x: int
    weight: Vector
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate:
    """Rotary position embedding of each head of x, in place."""

    x: int
    rope: RopeConfig
    head_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Store the step's keys and values, then causal attention over the layer's cache."""

    layer_index: int
    q: int
    k: int
    v: int
    head_size: int
    scale: float
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterProduct:
    """logits = x W^T with weights and sums in the wide dtype, never rounded to bf16."""

    x: int
    weight: Matrix
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Choose experts by their logits: ids best first, equal scores by lower index, and weights."""

    logits: int
    router: RouterConfig
    ids: int
    weights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """out = sum over the chosen experts, in routed order, of weight * expert(x)."""

    moe_layer_index: int
    x: int
    ids: int
    weights: int
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Glu:
    """out = silu(gate) * up."""

    gate: int
    up: int
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectRows:
    """The rows of x whose tokens want logits."""

    x: int
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A token of each row of logits, as the step's `sampling` asks (`tensor.sampling`): its id, -1
    for a row that is not numbers, and the row's largest logit."""

    logits: int
    ids: int
    peaks: int


Op = (
    Embed
    | Add
    | AddRmsNorm
    | Linear
    | HeadNorm
    | Rotate
    | Attend
    | RouterProduct
    | Route
    | Experts
    | Glu
    | SelectRows
    | Sample
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """The last op is `sample`; whoever wants the logits runs the ones before it."""

    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]

    @property
    def sample(self) -> Sample:
        """InternalError for a program that does not end with it."""
        if not self.ops or not isinstance(self.ops[-1], Sample):
            raise InternalError("the step program does not end with choosing tokens.")
        return self.ops[-1]

    @property
    def vocab_size(self) -> int:
        return self.buffers[self.sample.logits].width


@dataclass(frozen=True, slots=True, kw_only=True)
class Accesses:
    """Buffers that an op reads and writes; one changed in place is in both."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


class ProgramBuilder:
    """Collects buffers and ops. Runners check that they fit each other."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._ops: list[Op] = []

    def buffer(self, element: Element, width: int, rows: Rows = Rows.TOKENS) -> int:
        """A new buffer's number."""
        self._buffers.append(Buffer(rows=rows, element=element, width=width))
        return len(self._buffers) - 1

    def wide(self, width: int, rows: Rows = Rows.TOKENS) -> int:
        return self.buffer(Element.WIDE, width, rows)

    def activation(self, width: int, rows: Rows = Rows.TOKENS) -> int:
        return self.buffer(Element.ACTIVATION, width, rows)

    def width(self, buffer: int) -> int:
        """Columns of a buffer."""
        return self._buffers[buffer].width

    def append(self, *ops: Op) -> None:
        self._ops.extend(ops)

    def build(self, logits: int) -> StepProgram:
        """The program, which ends with a token of each row of logits."""
        ids = self.buffer(Element.INDEX, 1, Rows.OUTPUTS)
        self.append(Sample(logits=logits, ids=ids, peaks=self.wide(1, Rows.OUTPUTS)))
        return StepProgram(buffers=tuple(self._buffers), ops=tuple(self._ops))
