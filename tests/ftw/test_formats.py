"""Names and sizes of formats, and every layout against an element-wise reading."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.ftw.formats import block_bytes, matrix_bytes, parse_format, record_layout
from freetokend.ftw.matrix import QuantMatrix, dequantise, problem_of
from freetokend.ftw.packing import pack_rows16
from freetokend.ftw.packing_blocks import pack_blocks, unpack_blocks
from freetokend.ftw.packing_record import ExpertMatrices, pack_record, unpack_record
from tests.ftw import naive_formats
from tests.ftw.random_matrices import FORMATS, random_matrix

PARTS = ("codes", "scales", "zeros", "mins", "d", "dmin")


def same(left: QuantMatrix, right: QuantMatrix) -> bool:
    return (
        left.format == right.format
        and left.global_scale == right.global_scale
        and all(
            np.array_equal(getattr(left, part), getattr(right, part))
            if getattr(left, part) is not None
            else getattr(right, part) is None
            for part in PARTS
        )
    )


@pytest.mark.parametrize("name", FORMATS)
def test_names_are_canonical(name: str) -> None:
    assert str(parse_format(name)) == name


def test_aliases() -> None:
    assert str(parse_format("q4_0")) == "int4_g32_f16"
    assert str(parse_format("q8_0")) == "int8_g32_f16"


@pytest.mark.parametrize("name", ["", "int4", "int4_g16_f16", "int8_g32_f32", "q5_K", "BF16"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no weight format is called"):
        parse_format(name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("multiples", [1, 4, 5])
@pytest.mark.parametrize("rows", [1, 37])
def test_blocks_against_the_element_formula(name: str, multiples: int, rows: int) -> None:
    weight_format = parse_format(name)
    columns = multiples * weight_format.column_multiple
    if weight_format.column_multiple > 32:
        columns = min(columns, 2 * 256)
        columns -= columns % weight_format.column_multiple
    matrix = random_matrix(name, rows, columns, seed=rows + multiples)
    packed = pack_blocks(matrix)
    assert packed.shape[1] == block_bytes(weight_format, columns)
    assert packed.shape[1] == naive_formats.block_length(name, columns)
    assert packed.shape[1] % 64 == 0
    assert packed.size == matrix_bytes(weight_format, rows, columns)
    data = packed.tobytes()
    wanted = naive_formats.read_matrix(data, name, rows, columns, factor=matrix.global_scale)
    found = dequantise(matrix)
    assert np.allclose(found, wanted, rtol=1e-15, atol=0.0)
    assert np.count_nonzero(found) > 0
    assert same(unpack_blocks(packed, weight_format, rows, columns,
                              global_scale=matrix.global_scale), matrix)  # fmt: skip
    padding = naive_formats.read_matrix(data, name, -(-rows // 16) * 16, columns)[rows:]
    assert not padding.any()


@pytest.mark.parametrize("name", ["bf16", "fp8_block"])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 127, 128, 129, 150])
def test_formats_without_groups_have_any_width(name: str, columns: int) -> None:
    matrix = random_matrix(name, 18, columns, seed=columns)
    packed = pack_blocks(matrix)
    found = naive_formats.read_matrix(packed.tobytes(), name, 18, columns)
    assert np.allclose(found, dequantise(matrix), rtol=1e-15, atol=0.0)
    assert same(unpack_blocks(packed, matrix.format, 18, columns), matrix)


def test_bf16_is_what_it_was_in_the_first_layout() -> None:
    matrix = random_matrix("bf16", 21, 33, seed=1)
    assert pack_blocks(matrix).tobytes() == pack_rows16(matrix.codes).tobytes()


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([name for name in FORMATS if name not in ("q4_K", "q6_K")]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_records_against_the_element_formula(
    name: str, wide: int, deep: int, has_bias: bool, seed: int
) -> None:
    step = parse_format(name).column_multiple
    hidden, inner = (wide * step, deep * step) if step > 1 else (17 * wide, 13 * deep)
    check_record(name, hidden, inner, has_bias=has_bias, seed=seed)


@pytest.mark.parametrize("name", ["q4_K", "q6_K"])
def test_records_of_k_formats(name: str) -> None:
    check_record(name, 256, 256, has_bias=True, seed=3)


def check_record(name: str, hidden: int, inner: int, *, has_bias: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    gate, up, down = (
        random_matrix(name, rows, columns, seed=seed + part)
        for part, (rows, columns) in enumerate(((inner, hidden), (inner, hidden), (hidden, inner)))
    )
    biases = None
    if has_bias:
        biases = tuple(
            random.standard_normal(size).astype(np.float32) for size in (inner, inner, hidden)
        )
    expert = ExpertMatrices(gate=gate, up=up, down=down, biases=biases)
    record = pack_record(expert)
    layout = record_layout(parse_format(name), hidden, inner, has_bias=has_bias)
    assert record.size == layout.record_bytes
    assert record.size % 4096 == 0
    matrices, read_biases = naive_formats.read_expert(
        record.tobytes(), name, hidden, inner, has_bias=has_bias
    )
    for part, wanted in zip((gate, up, down), matrices, strict=True):
        assert np.allclose(dequantise(part), wanted, rtol=1e-15, atol=0.0)
    for ours, theirs in zip(biases or (), read_biases, strict=True):
        assert np.array_equal(ours, theirs)
    again = unpack_record(record, gate.format, hidden, inner, has_bias=has_bias)
    for part in ("gate", "up", "down"):
        assert same(getattr(again, part), getattr(expert, part))
    for ours, theirs in zip(biases or (), again.biases or (), strict=True):
        assert np.array_equal(ours, theirs)


def test_gate_and_up_keep_their_own_factors() -> None:
    parts = [random_matrix("nvfp4", 32, 32, seed=part) for part in range(3)]
    for factor, part in zip((1.0, 0.25, 3.0), parts, strict=True):
        object.__setattr__(part, "global_scale", factor)
    record = pack_record(ExpertMatrices(gate=parts[0], up=parts[1], down=parts[2]))
    again = unpack_record(record, parts[0].format, 32, 32)
    assert [again.gate.global_scale, again.up.global_scale, again.down.global_scale] == [1, 0.25, 3]


@pytest.mark.parametrize(
    ("name", "columns"), [("mxfp4", 48), ("nvfp4", 8), ("q4_K", 576), ("int8_g128_f16", 64)]
)
def test_widths_that_a_group_does_not_divide_are_refused(name: str, columns: int) -> None:
    with pytest.raises(ValueError, match=rf"{columns} columns are not a multiple of"):
        block_bytes(parse_format(name), columns)


def test_record_of_an_inner_size_that_a_group_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="8 columns are not a multiple of 16"):
        record_layout(parse_format("nvfp4"), 64, 8)


def test_arrays_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scales must be uint8 \[2, 1\], not absent"):
        QuantMatrix(
            format=parse_format("mxfp4"),
            rows_count=2,
            columns_count=32,
            codes=np.zeros((2, 32), np.uint8),
        )
    with pytest.raises(ValueError, match="bf16 matrices have no scales"):
        QuantMatrix(
            format=parse_format("bf16"),
            rows_count=2,
            columns_count=32,
            codes=np.zeros((2, 32), np.uint16),
            scales=np.zeros((2, 1), np.uint8),
        )


@pytest.mark.parametrize(
    ("name", "part", "value", "problem"),
    [
        ("fp8_block", "codes", 0xFF, "fp8 code for not-a-number"),
        ("fp8_block", "scales", np.inf, "scale that is not finite"),
        ("mxfp4", "scales", 255, "e8m0 scale for not-a-number"),
        ("nvfp4", "scales", 127, "e4m3 scale that is negative or not a number"),
        ("int4_g32_f16", "scales", 0x7C00, "scale that is not finite"),
        ("int8_g128_bf16", "scales", 0x7F80, "scale that is not finite"),
        ("q4_K", "dmin", 0x7C01, "scale that is not finite"),
        ("q6_K", "d", 0xFC00, "scale that is not finite"),
    ],
)
def test_numbers_that_are_none_are_found(name: str, part: str, value: float, problem: str) -> None:
    matrix = random_matrix(name, 3, 256, seed=0)
    assert problem_of(matrix) is None
    getattr(matrix, part)[1 if part != "scales" else 0, 1 if part == "codes" else 0] = value
    assert problem in str(problem_of(matrix))
