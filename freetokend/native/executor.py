"""The CPU executor: typed face of the `_exec` extension module.

Buffers are passed as addresses (int): the callers own them, keep them alive during the call and
check contiguity and dtype. Shapes: T tokens, k experts per token, H hidden size, N output and K
input features, Nq/Nkv heads, D head size, S sequences. Weights are in the "rows16" layout of their
format: blocks of 16 rows, as docs/ftw.md describes.

Numerics: an output element depends on its own row and token only, never on the number of tokens,
threads or the blocking; equal inputs give equal bits within one instruction set. Sums are fp32.
With numerics "exact" activations are used as the bf16 they are; with "fast" they are rounded to
int8 with a scale per 32 columns where the weight format is an integer or 4-bit one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, Self

from freetokend.core.errors import ConfigError, InternalError, Reason, ResourceError
from freetokend.native import _exec
from freetokend.native.affinity import require_usable

Numerics = Literal["exact", "fast"]


@contextmanager
def faults() -> Iterator[None]:
    """What the extension refuses is a fault of the calling code."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InternalError(f"CPU executor called wrongly: {error}") from error
    except MemoryError as error:
        raise ResourceError("no memory for the CPU executor's working buffers") from error
    except RuntimeError as error:
        raise InternalError(f"CPU executor: {error}") from error


def is_fast(numerics: Numerics) -> bool:
    """Whether products may round activations. InternalError for numerics that do not exist."""
    if numerics not in ("exact", "fast"):
        raise InternalError(f'numerics "{numerics}" are unknown: pass "exact" or "fast"')
    return numerics == "fast"


def available_isas() -> tuple[str, ...]:
    """Instruction sets that this build has and this machine runs, best first."""
    return tuple(_exec.available_isas())


def rows16_bytes(rows: int, columns: int) -> int:
    """Bytes of a [rows, columns] bf16 matrix in the rows16 layout."""
    return _exec.rows16_bytes(rows, columns)


def matrix_bytes(weight_format: str, rows: int, columns: int) -> int:
    """Bytes of a [rows, columns] matrix in the rows16 layout of a weight format.

    InternalError for a name that is no format (docs/ftw.md lists them).
    """
    with faults():
        return _exec.matrix_bytes(weight_format, rows, columns)


def expert_bytes(
    weight_format: str, hidden_size: int, intermediate_size: int, *, has_bias: bool = False
) -> int:
    """Bytes of one expert of a weight format, without the padding of its record."""
    with faults():
        return _exec.expert_bytes(weight_format, hidden_size, intermediate_size, has_bias)


def pack_rows16(source: int, rows: int, columns: int, packed: int) -> None:
    """Row-major bf16 [rows, columns] at `source` -> rows16 at `packed`, padding zeroed."""
    _exec.pack_rows16(source, rows, columns, packed)


def unpack_rows16(packed: int, rows: int, columns: int, target: int) -> None:
    """The inverse of `pack_rows16`."""
    _exec.unpack_rows16(packed, rows, columns, target)


class Executor:
    """Runs kernels on one thread per given cpu; the calling thread is the first of them.

    The other threads are pinned to cpus[1:]. They spin for `spin_s` after a job, then sleep. All
    calls release the GIL, are synchronous, and must come from one thread at a time. Wrong
    dimensions, ids out of range and unaligned weights raise InternalError before anything is
    written.
    """

    def __init__(self, cpus: Sequence[int], *, spin_s: float = 50e-6, isa: str = "auto") -> None:
        """isa: "auto" (the best that this machine runs) or a name of `available_isas()`.

        Raises ConfigError for an unknown instruction set or an impossible cpu list, ResourceError
        for an instruction set that this processor lacks.
        """
        if not 0 <= spin_s <= 1:
            raise ConfigError(f"spin_s is {spin_s}; it must be between 0 and 1 second")
        try:
            self._native: _exec.Executor | None = _exec.Executor(list(cpus), spin_s=spin_s, isa=isa)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        except RuntimeError as error:
            raise ResourceError(str(error), reason=Reason.DEVICE_UNUSABLE) from error
        require_usable(cpus)  # there the threads would run anywhere, and nobody would know
        self._isa = self._native.isa
        self._threads_count = self._native.threads_count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._isa

    @property
    def threads_count(self) -> int:
        """Threads of a call, the calling one included."""
        return self._threads_count

    def has_fast(self, weight_format: str) -> bool:
        """Whether numerics "fast" changes products of this format on this instruction set."""
        with faults():
            return self.native.has_fast(weight_format)

    def close(self) -> None:
        """Ends the threads. No call may be in progress; later calls raise InternalError."""
        self._native = None

    @property
    def native(self) -> _exec.Executor:
        """The extension's object, for its other faces; InternalError when closed."""
        if self._native is None:
            raise InternalError("the CPU executor has been closed")
        return self._native

    def linear(  # noqa: PLR0913 - the addresses and sizes of one kernel call
        self,
        x: int,
        w: int,
        y: int,
        *,
        tokens: int,
        in_features: int,
        out_features: int,
        bias: int = 0,
        weight_format: str = "bf16",
        numerics: Numerics = "exact",
    ) -> None:
        """y = x W^T (+ bias).

        x: bf16 [T, K]; w: [N, K] in the rows16 layout of `weight_format`; bias: fp32 [N], 0 for
        none; y: fp32 [T, N].
        """
        with faults():
            self.native.linear(
                x,
                w,
                y,
                tokens=tokens,
                in_features=in_features,
                out_features=out_features,
                bias=bias,
                weight_format=weight_format,
                fast=is_fast(numerics),
            )

    def experts(  # noqa: PLR0913 - the addresses and sizes of one kernel call
        self,
        x: int,
        expert_ids: int,
        weights: int,
        y: int,
        *,
        tokens: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        bank: int,
        record_bytes: int,
        experts_count: int,
        weight_format: str = "bf16",
        has_bias: bool = False,
        activation: str = "silu",
        activation_limit: float = 0.0,
        activation_alpha: float = 1.702,
        numerics: Numerics = "exact",
    ) -> None:
        """y[t, j] = weights[t, j] * expert(x[t]), expert = down(act(gate x) * up x).

        x: bf16 [T, H]; expert_ids: int32 [T, k], record index inside the bank, or -1 for a row of
        zeros; weights: fp32 [T, k]; y: fp32 [T, k, H]. bank: address of the first of
        `experts_count` records of `record_bytes`, in `weight_format`. Tokens are grouped by
        expert, so that an expert shared by several tokens is read once. The product of gate and up
        is rounded to bf16. activation: "silu", "gelu", "gelu_tanh" or "swiglu_oai"
        ((up + 1) * gate * sigmoid(alpha * gate)); a limit above 0 clamps gate to at most it and up
        to +-it.
        """
        with faults():
            self.native.experts(
                x,
                expert_ids,
                weights,
                y,
                tokens=tokens,
                top_k=top_k,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                bank=bank,
                record_bytes=record_bytes,
                experts_count=experts_count,
                weight_format=weight_format,
                has_bias=has_bias,
                activation=activation,
                activation_limit=activation_limit,
                activation_alpha=activation_alpha,
                fast=is_fast(numerics),
            )

    def merge(self, y: int, out: int, *, tokens: int, top_k: int, hidden_size: int) -> None:
        """out[t] = sum over k, in order, of y[t, k]. y: fp32 [T, k, H]; out: fp32 [T, H]."""
        with faults():
            self.native.merge(y, out, tokens=tokens, top_k=top_k, hidden_size=hidden_size)

    def rms_norm(self, x: int, weight: int, y: int, *, rows: int, size: int, eps: float) -> None:
        """y = x / sqrt(mean(x^2) + eps) * weight, per row.

        x: fp32 [rows, size]; weight: fp32 [size]; y: bf16 [rows, size].
        """
        with faults():
            self.native.rms_norm(x, weight, y, rows=rows, size=size, eps=eps)

    def embed_rows16(
        self,
        w: int,
        ids: int,
        out: int,
        *,
        tokens: int,
        features: int,
        vocab_size: int = 0,
    ) -> None:
        """out[t] = row ids[t] of the rows16 matrix w. ids: int64 [T]; out: fp32 [T, features].

        vocab_size: rows of w, to check the ids against; 0 checks for negative ids only.
        """
        with faults():
            self.native.embed_rows16(
                w, ids, out, tokens=tokens, features=features, vocab_size=vocab_size
            )

    def store_kv(  # noqa: PLR0913 - the addresses and sizes of one kernel call
        self,
        k: int,
        v: int,
        k_pages: int,
        v_pages: int,
        page_table: int,
        sequence_index: int,
        positions: int,
        *,
        tokens: int,
        kv_heads: int,
        head_size: int,
        page_tokens: int,
        max_pages: int,
        sequences_count: int = 0,
        pages_count: int = 0,
    ) -> None:
        """Writes the keys and values of T tokens into their pages, rounded to bf16.

        k, v: fp32 [T, Nkv, D]; k_pages, v_pages: bf16 [pages, Nkv, page_tokens, D]; page_table:
        int32 [S, max_pages]; sequence_index, positions: int32 [T]. sequences_count and
        pages_count bound the indices; 0 leaves that bound unchecked.
        """
        with faults():
            self.native.store_kv(
                k,
                v,
                k_pages,
                v_pages,
                page_table,
                sequence_index,
                positions,
                tokens=tokens,
                kv_heads=kv_heads,
                head_size=head_size,
                page_tokens=page_tokens,
                max_pages=max_pages,
                sequences_count=sequences_count,
                pages_count=pages_count,
            )

    def paged_attention(  # noqa: PLR0913 - the addresses and sizes of one kernel call
        self,
        q: int,
        k_pages: int,
        v_pages: int,
        page_table: int,
        sequence_index: int,
        positions: int,
        out: int,
        *,
        tokens: int,
        q_heads: int,
        kv_heads: int,
        head_size: int,
        page_tokens: int,
        max_pages: int,
        scale: float,
        sequences_count: int = 0,
        pages_count: int = 0,
    ) -> None:
        """Causal attention: a token at position p attends to positions 0..p of its sequence.

        q: fp32 [T, Nq, D]; out: bf16 [T, Nq * D]; the rest as in `store_kv`, which must have
        written those positions. Query head h reads kv head h // (Nq // Nkv).
        """
        with faults():
            self.native.paged_attention(
                q,
                k_pages,
                v_pages,
                page_table,
                sequence_index,
                positions,
                out,
                tokens=tokens,
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_size=head_size,
                page_tokens=page_tokens,
                max_pages=max_pages,
                scale=scale,
                sequences_count=sequences_count,
                pages_count=pages_count,
            )

    def sample(
        self, logits: int, params: int, token_ids: int, peaks: int, *, rows: int, vocab_size: int
    ) -> None:
        """A token of each row of logits, spread over the threads.

        logits: fp32 [rows, vocab_size]; params: [rows] of fp64 temperature, int64 top_k, fp64
        top_p, fp64 min_p, uint64 seed, uint64 draw index; token_ids: int32 [rows]; peaks: fp32
        [rows]. `freetokend.tensor.sampling` says what they mean. InternalError for parameters that
        are negative or NaN.
        """
        with faults():
            self.native.sample(logits, params, token_ids, peaks, rows=rows, vocab_size=vocab_size)

    def stream_read(self, data: int, length_bytes: int) -> int:
        """Reads memory once with all threads (64-byte aligned); returns a checksum.

        The time it takes is the machine's read ceiling for the kernels.
        """
        with faults():
            return self.native.stream_read(data, length_bytes)
