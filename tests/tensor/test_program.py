"""Step programs: what fits together, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from freetokend.core.errors import InternalError
from freetokend.tensor.program import (
    Add,
    AddRmsNorm,
    Element,
    Embed,
    Linear,
    Matrix,
    Product,
    ProgramBuilder,
    Rows,
    Sample,
    SelectRows,
    StepProgram,
    Vector,
)
from freetokend.tensor.program_check import accesses, check_program


def _matrix(name: str, out_features: int, in_features: int) -> Matrix:
    return Matrix(name=name, out_features=out_features, in_features=in_features)


def _program() -> StepProgram:
    """Embed, select, norm, logits."""
    new = ProgramBuilder()
    residual, last = new.wide(8), new.wide(8, Rows.OUTPUTS)
    normed, logits = new.activation(8, Rows.OUTPUTS), new.wide(10, Rows.OUTPUTS)
    product = Product(weight=_matrix("head.weight", 10, 8), bias=None, out=logits)
    new.append(
        Embed(table=_matrix("embed.weight", 10, 8), out=residual),
        SelectRows(x=residual, out=last),
        AddRmsNorm(
            residual=last, delta=None, weight=Vector(name="n", size=8), eps=1e-6, out=normed
        ),
        Linear(x=normed, products=(product,)),
    )
    return new.build(logits)


def _with_op(index: int, **changes: object) -> StepProgram:
    program = _program()
    ops = list(program.ops)
    ops[index] = replace(ops[index], **changes)  # type: ignore[arg-type]
    return replace(program, ops=tuple(ops))


def _of_tokens() -> StepProgram:
    """Embed, and a token for each token."""
    program = _program()
    ids, peaks = (len(program.buffers) - 2, len(program.buffers) - 1)
    buffers = tuple(replace(buffer, rows=Rows.TOKENS) for buffer in program.buffers)
    sample = Sample(logits=0, ids=ids, peaks=peaks)
    return StepProgram(buffers=buffers, ops=(program.ops[0], sample))


def test_a_program_that_fits_is_accepted() -> None:
    program = _program()
    check_program(program)
    assert program.vocab_size == 10
    assert accesses(Add(residual=3, delta=4)).reads == (3, 4)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: _with_op(0, out=9), r"op 0 \(Embed\).* buffer 9, which does not exist"),
        (lambda: _with_op(1, x=1), r"op 1 \(SelectRows\).* reads buffer 1 before it is written"),
        (lambda: _with_op(0, table=_matrix("e", 10, 7)), r"op 0 .*7 wide; it is wide and 8"),
        (lambda: _with_op(2, out=1), r"op 2 .* to be activation .* it is wide"),
        (lambda: _with_op(2, residual=0), "mixes rows of tokens and rows of outputs"),
        (lambda: _with_op(0, out=3), r"mixes rows"),
        (lambda: _with_op(4, logits=0), r"op 4 \(Sample\).* mixes rows"),
        (lambda: _with_op(4, ids=3), r"op 4 .* buffer 3 to be index and 1 wide"),
        (_of_tokens, "by rows that are not its outputs"),
        (lambda: replace(_program(), ops=_program().ops[:4]), "does not end with choosing tokens"),
        (lambda: replace(_program(), ops=()), "does not end with choosing tokens"),
    ],
)
def test_a_program_that_no_runner_could_execute_is_refused(
    make: Callable[[], StepProgram], complaint: str
) -> None:
    with pytest.raises(InternalError, match=complaint):
        check_program(make())


def test_buffers_are_numbered_in_order() -> None:
    new = ProgramBuilder()
    assert [new.wide(4), new.activation(2), new.buffer(Element.INDEX, 3)] == [0, 1, 2]
    assert [new.width(number) for number in range(3)] == [4, 2, 3]
