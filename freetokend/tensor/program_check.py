"""What a step program must satisfy before any runner may execute it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from freetokend.core.errors import InternalError
from freetokend.tensor.program import (
    Accesses,
    Add,
    AddRmsNorm,
    Attend,
    Element,
    Embed,
    Experts,
    Glu,
    HeadNorm,
    Linear,
    Op,
    Rotate,
    Route,
    RouterProduct,
    Rows,
    Sample,
    SelectRows,
    StepProgram,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A buffer that an op uses; width None: any."""

    buffer: int
    element: Element
    width: int | None = None


def accesses(op: Op) -> Accesses:
    """Which buffers an op touches."""
    match op:
        case Embed():
            return Accesses(reads=(), writes=(op.out,))
        case Add():
            return Accesses(reads=(op.residual, op.delta), writes=(op.residual,))
        case AddRmsNorm():
            if op.delta is None:
                return Accesses(reads=(op.residual,), writes=(op.out,))
            return Accesses(reads=(op.residual, op.delta), writes=(op.residual, op.out))
        case Linear():
            return Accesses(reads=(op.x,), writes=tuple(one.out for one in op.products))
        case HeadNorm() | Rotate():
            return Accesses(reads=(op.x,), writes=(op.x,))
        case Attend():
            return Accesses(reads=(op.q, op.k, op.v), writes=(op.out,))
        case RouterProduct() | SelectRows():
            return Accesses(reads=(op.x,), writes=(op.out,))
        case Route():
            return Accesses(reads=(op.logits,), writes=(op.ids, op.weights))
        case Experts():
            return Accesses(reads=(op.x, op.ids, op.weights), writes=(op.out,))
        case Glu():
            return Accesses(reads=(op.gate, op.up), writes=(op.out,))
        case Sample():
            return Accesses(reads=(op.logits,), writes=(op.ids, op.peaks))


def check_program(program: StepProgram) -> None:
    """Raises InternalError naming the first op whose buffers do not fit it, or that reads a buffer
    which nothing has written."""
    written: set[int] = set()
    for index, op in enumerate(program.ops):
        where = f"op {index} ({type(op).__name__}) of the step program"
        touched = accesses(op)
        for number in (*touched.reads, *touched.writes):
            if not 0 <= number < len(program.buffers):
                raise InternalError(f"{where} uses buffer {number}, which does not exist.")
        unwritten = [number for number in touched.reads if number not in written]
        if unwritten:
            raise InternalError(f"{where} reads buffer {unwritten[0]} before it is written.")
        written.update(touched.writes)
        _check_rows(program, op, where)
        for use in _uses(program, op):
            buffer = program.buffers[use.buffer]
            if buffer.element is not use.element or use.width not in (None, buffer.width):
                raise InternalError(
                    f"{where} needs buffer {use.buffer} to be {use.element} and "
                    f"{use.width or 'any number of columns'} wide; it is {buffer.element} and "
                    f"{buffer.width} wide."
                )
    if program.buffers[program.sample.logits].rows is not Rows.OUTPUTS:
        raise InternalError("the step program chooses tokens by rows that are not its outputs.")


def _check_rows(program: StepProgram, op: Op, where: str) -> None:
    touched = accesses(op)
    kinds = {program.buffers[number].rows for number in (*touched.reads, *touched.writes)}
    if isinstance(op, SelectRows):
        fits = program.buffers[op.x].rows is Rows.TOKENS
        fits &= program.buffers[op.out].rows is Rows.OUTPUTS
    elif isinstance(op, Embed | Rotate | Attend):
        fits = kinds == {Rows.TOKENS}
    else:
        fits = len(kinds) == 1
    if not fits:
        raise InternalError(f"{where} mixes rows of tokens and rows of outputs.")


def _uses(program: StepProgram, op: Op) -> Iterator[_Use]:
    """What the op demands of the buffers it names."""
    wide, activation, index = Element.WIDE, Element.ACTIVATION, Element.INDEX
    match op:
        case Embed():
            yield _Use(buffer=op.out, element=wide, width=op.table.in_features)
        case Add():
            size = program.buffers[op.residual].width
            yield _Use(buffer=op.residual, element=wide)
            yield _Use(buffer=op.delta, element=wide, width=size)
        case AddRmsNorm():
            yield _Use(buffer=op.residual, element=wide, width=op.weight.size)
            if op.delta is not None:
                yield _Use(buffer=op.delta, element=wide, width=op.weight.size)
            yield _Use(buffer=op.out, element=activation, width=op.weight.size)
        case Linear():
            for one in op.products:
                yield _Use(buffer=op.x, element=activation, width=one.weight.in_features)
                yield _Use(buffer=one.out, element=wide, width=one.weight.out_features)
        case HeadNorm():
            yield _Use(buffer=op.x, element=wide, width=_heads(program, op.x, op.weight.size))
        case Rotate():
            yield _Use(buffer=op.x, element=wide, width=_heads(program, op.x, op.head_size))
        case Attend():
            kv_size = _heads(program, op.k, op.head_size)
            q_size = _heads(program, op.q, kv_size)
            yield _Use(buffer=op.q, element=wide, width=q_size)
            yield _Use(buffer=op.k, element=wide, width=kv_size)
            yield _Use(buffer=op.v, element=wide, width=kv_size)
            yield _Use(buffer=op.out, element=activation, width=q_size)
        case RouterProduct() | Route() | Experts():
            yield from _expert_uses(program, op)
        case Glu():
            size = program.buffers[op.out].width
            yield _Use(buffer=op.gate, element=wide, width=size)
            yield _Use(buffer=op.up, element=wide, width=size)
            yield _Use(buffer=op.out, element=activation)
        case SelectRows():
            yield _Use(buffer=op.x, element=wide)
            yield _Use(buffer=op.out, element=wide, width=program.buffers[op.x].width)
        case Sample():
            yield _Use(buffer=op.logits, element=wide)
            yield _Use(buffer=op.ids, element=index, width=1)
            yield _Use(buffer=op.peaks, element=wide, width=1)


def _expert_uses(program: StepProgram, op: RouterProduct | Route | Experts) -> Iterator[_Use]:
    wide, activation, index = Element.WIDE, Element.ACTIVATION, Element.INDEX
    match op:
        case RouterProduct():
            yield _Use(buffer=op.x, element=activation, width=op.weight.in_features)
            yield _Use(buffer=op.out, element=wide, width=op.weight.out_features)
        case Route():
            yield _Use(buffer=op.logits, element=wide)
            yield _Use(buffer=op.ids, element=index, width=op.router.top_k)
            yield _Use(buffer=op.weights, element=wide, width=op.router.top_k)
        case Experts():
            size = program.buffers[op.x].width
            yield _Use(buffer=op.x, element=activation)
            yield _Use(buffer=op.ids, element=index)
            yield _Use(buffer=op.weights, element=wide, width=program.buffers[op.ids].width)
            yield _Use(buffer=op.out, element=wide, width=size)


def _heads(program: StepProgram, buffer: int, unit: int) -> int:
    """The buffer's width if it is a multiple of `unit`, else the next multiple: a mismatch."""
    width = program.buffers[buffer].width
    return max(-(-width // unit), 1) * unit
