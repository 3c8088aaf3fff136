"""Routed experts as gpt-oss checkpoints have them: mxfp4, all experts of a layer in one tensor.

`experts.gate_up_proj_blocks` u8 [E, 2 I, H/32, 16] and `..._scales` u8 [E, 2 I, H/32], e8m0, whose
rows are gate 0, up 0, gate 1, up 1, ...; `experts.down_proj_blocks` [E, H, I/32, 16] and scales;
biases bf16 [E, 2 I], in the same order, and [E, H].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freetokend.core.errors import ModelDataError
from freetokend.core.quantization_config import QuantScheme
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.formats import Kind, parse_format
from freetokend.ftw.matrix import F32, MatrixSource
from freetokend.ftw.packing import as_f32
from freetokend.ftw.safetensors import SourceTensor
from freetokend.ftw.schemes.fp4 import Fp4Source
from freetokend.ftw.schemes.parts import FLOATS, Parts, check_width
from freetokend.ftw.schemes.scheme import PlainScheme

_GROUP: Final = 32
_GROUP_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasSource:
    """A vector: every `step`-th element, from `first` on, of a plain tensor."""

    name: str
    parts: Parts
    tensor: SourceTensor
    first: int
    count: int
    step: int

    def read(self) -> F32:
        """The values, exact: f32 [count]. ModelDataError when one is not finite."""
        raw = as_f32(self.parts.whole(self.tensor), self.tensor.dtype)
        values = raw[self.first : self.first + self.count * self.step : self.step].copy()
        if not (abs(values) < float("inf")).all():
            raise ModelDataError(
                f"{self.tensor.file}: tensor {self.name} holds a bias that is not finite."
            )
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedExpert:
    """One expert: gate, up [I, H] and down [H, I], and what is added to their products."""

    gate: MatrixSource
    up: MatrixSource
    down: MatrixSource
    gate_bias: BiasSource
    up_bias: BiasSource
    down_bias: BiasSource


class GptOssScheme(PlainScheme):
    """A checkpoint with gpt-oss's routed experts; every other tensor is plain.

    Experts may be plain in it too, as they are where somebody saved what the codes mean.
    """

    name = QuantScheme.MXFP4.value

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._parts = Parts(checkpoint)
        self.consumed = self._parts.consumed

    def has_expert(self, prefix: str) -> bool:
        """Whether experts are in mxfp4. prefix: as of `expert`."""
        return self._parts.has(prefix + "gate_up_proj_blocks") or not self.has(
            prefix + "gate_up_proj"
        )

    def expert(
        self, prefix: str, expert: int, *, experts: int, hidden: int, inner: int
    ) -> BiasedExpert:
        """Expert number `expert` (from 0) of `experts`. prefix: `model.layers.3.mlp.experts.`.

        ModelDataError names what is missing or of another shape.
        """
        gate_up, down = prefix + "gate_up_proj", prefix + "down_proj"
        both, height = self._parts, 2 * inner
        gate_up_bias = both.need(gate_up + "_bias", [(experts, height)], FLOATS, of=gate_up)
        down_bias = both.need(down + "_bias", [(experts, hidden)], FLOATS, of=down)

        def bias(tensor: SourceTensor, first: int, count: int, step: int) -> BiasSource:
            return BiasSource(
                name=tensor.name, parts=both, tensor=tensor, first=first, count=count, step=step
            )

        start = expert * height
        return BiasedExpert(
            gate=self._rows(gate_up, (experts, height, hidden), start, 2, inner),
            up=self._rows(gate_up, (experts, height, hidden), start + 1, 2, inner),
            down=self._rows(down, (experts, hidden, inner), expert * hidden, 1, hidden),
            gate_bias=bias(gate_up_bias, start, inner, 2),
            up_bias=bias(gate_up_bias, start + 1, inner, 2),
            down_bias=bias(down_bias, expert * hidden, hidden, 1),
        )

    def _rows(
        self, name: str, shape: tuple[int, int, int], first: int, step: int, count: int
    ) -> Fp4Source:
        experts, height, width = shape
        weight_format = parse_format(Kind.MXFP4)
        check_width(name, weight_format, width)
        groups = (experts, height, width // _GROUP)
        return Fp4Source(
            name=name,
            format=weight_format,
            rows_count=count,
            columns_count=width,
            parts=self._parts,
            codes=self._parts.need(name + "_blocks", [(*groups, _GROUP_BYTES)], ("U8",), of=name),
            scales=self._parts.need(name + "_scales", [groups], ("U8", "F8_E8M0"), of=name),
            first_row=first,
            row_step=step,
            row_codes=groups[-1],
        )
