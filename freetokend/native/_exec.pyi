from collections.abc import Sequence

class Executor:
    def __init__(self, cpus: Sequence[int], *, spin_s: float, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads_count(self) -> int: ...
    def linear(
        self,
        x: int,
        w: int,
        y: int,
        *,
        tokens: int,
        in_features: int,
        out_features: int,
        bias: int,
        weight_format: str,
        fast: bool,
    ) -> None: ...
    def experts(
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
        weight_format: str,
        has_bias: bool,
        activation: str,
        activation_limit: float,
        activation_alpha: float,
        fast: bool,
    ) -> None: ...
    def merge(self, y: int, out: int, *, tokens: int, top_k: int, hidden_size: int) -> None: ...
    def rms_norm(
        self, x: int, weight: int, y: int, *, rows: int, size: int, eps: float
    ) -> None: ...
    def embed_rows16(
        self, w: int, ids: int, out: int, *, tokens: int, features: int, vocab_size: int
    ) -> None: ...
    def store_kv(
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
        sequences_count: int,
        pages_count: int,
    ) -> None: ...
    def paged_attention(
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
        sequences_count: int,
        pages_count: int,
    ) -> None: ...
    def stream_read(self, data: int, length_bytes: int) -> int: ...

class Sampler:
    def __init__(self) -> None: ...
    def sample_row(
        self,
        logits: int,
        *,
        vocab_size: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        draw_index: int,
    ) -> tuple[int, bool, float]: ...

def available_isas() -> list[str]: ...
def rows16_bytes(rows: int, columns: int) -> int: ...
def expert_bytes(
    weight_format: str, hidden_size: int, intermediate_size: int, has_bias: bool
) -> int: ...
def matrix_bytes(weight_format: str, rows: int, columns: int) -> int: ...
def pack_rows16(source: int, rows: int, columns: int, packed: int) -> None: ...
def unpack_rows16(packed: int, rows: int, columns: int, target: int) -> None: ...
