from collections.abc import Sequence

class Executor:
    def __init__(self, cpus: Sequence[int], *, spin_s: float, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads_count(self) -> int: ...
    def has_fast(self, weight_format: str) -> bool: ...
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
    def sample(
        self, logits: int, params: int, token_ids: int, peaks: int, *, rows: int, vocab_size: int
    ) -> None: ...
    def stream_read(self, data: int, length_bytes: int) -> int: ...

class KvPages:
    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        *,
        pages_count: int,
        kv_heads: int,
        page_tokens: int,
        head_size: int,
    ) -> None: ...

class ExpertDispatch: ...

class BankExperts(ExpertDispatch):
    def __init__(
        self,
        records: int,
        *,
        record_bytes: int,
        layers_count: int,
        experts_per_layer_count: int,
        hidden_size: int,
        intermediate_size: int,
        weight_format: str,
        has_bias: bool,
        activation: str,
        activation_limit: float,
        activation_alpha: float,
        fast: bool,
    ) -> None: ...
    @property
    def executions_count(self) -> int: ...

class RoutingTap(ExpertDispatch):
    def __init__(self, inner: ExpertDispatch) -> None: ...
    def start(self, capacity_ids: int) -> None: ...
    def stop(self) -> None: ...
    def clear(self) -> None: ...
    def take(self) -> tuple[list[tuple[int, int, int]], bytes, bool]: ...

class Step:
    def __init__(
        self,
        *,
        token_ids: int,
        tokens: int,
        outputs: int,
        outputs_count: int,
        sampling: int,
        page_table: int,
        sequence_index: int,
        positions: int,
        sequences: int,
        max_pages: int,
        kv: KvPages,
        rotations: Sequence[tuple[int, int]],
    ) -> None: ...

# Ops name buffers by number and weights by address; their meaning: freetokend.tensor.program.
class Program:
    def __init__(
        self, buffers: Sequence[tuple[int, bool]], experts: ExpertDispatch | None
    ) -> None: ...
    @property
    def ops_count(self) -> int: ...
    @property
    def finished_ops_count(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    def prepare(self, step: Step) -> None: ...
    def run(self, executor: Executor, step: Step, first: int, last: int) -> None: ...
    def buffer(self, index: int) -> int: ...
    # table: bf16 [vocab_size, features]
    def add_embed(
        self, *, table: int, rows16: bool, vocab_size: int, features: int, out: int
    ) -> None: ...
    def add_add(self, *, residual: int, delta: int, size: int) -> None: ...
    # weight: fp32 [size]
    def add_add_rms_norm(
        self, *, residual: int, delta: int | None, weight: int, eps: float, size: int, out: int
    ) -> None: ...
    # products: (rows16 matrix, weight format, fp32 bias or 0, out_features, out)
    def add_linear(
        self,
        *,
        x: int,
        in_features: int,
        products: Sequence[tuple[int, str, int, int, int]],
        fast: bool,
    ) -> None: ...
    # weight: fp32 [head_size]
    def add_head_norm(
        self, *, x: int, heads: int, head_size: int, weight: int, eps: float
    ) -> None: ...
    # table: index into the step's rotations
    def add_rotate(self, *, x: int, heads: int, head_size: int, table: int) -> None: ...
    def add_attend(
        self,
        *,
        layer_index: int,
        q: int,
        k: int,
        v: int,
        out: int,
        q_heads: int,
        kv_heads: int,
        head_size: int,
        scale: float,
    ) -> None: ...
    # weights: fp32 [experts_count, hidden_size], copied
    def add_router(
        self, *, x: int, hidden_size: int, experts_count: int, weights: int, out: int
    ) -> None: ...
    def add_route(
        self,
        *,
        logits: int,
        experts_count: int,
        top_k: int,
        renormalise: bool,
        ids: int,
        weights: int,
    ) -> None: ...
    def add_experts(
        self,
        *,
        moe_layer_index: int,
        x: int,
        ids: int,
        weights: int,
        top_k: int,
        hidden_size: int,
        out: int,
    ) -> None: ...
    def add_glu(self, *, gate: int, up: int, size: int, out: int) -> None: ...
    def add_select_rows(self, *, x: int, size: int, out: int) -> None: ...
    def add_sample(self, *, logits: int, vocab_size: int, ids: int, peaks: int) -> None: ...

class CachePlanner:
    def __init__(
        self,
        *,
        slot_of_expert: int,
        expert_of_slot: int,
        slot_key: int,
        demanded_at: int,
        score: int,
        clock: int,
        slots_count: int,
        slots_capacity: int,
        layers_count: int,
        experts_per_layer_count: int,
        cpu_kernel: bool,
        half_life_ticks: int,
        ticks_per_layer: int,
    ) -> None: ...
    def plan(
        self,
        moe_layer_index: int,
        *,
        routed: int,
        tokens_capacity: int,
        top_k: int,
        valid_tokens: int,
        fillable: int,
        fill_count: int,
        buckets_count: int,
        misses_capacity: int,
        physical: int,
        fills: int,
        fills_count: int,
        cpu: int,
        cpu_count: int,
        stats: int,
    ) -> None: ...
    def reserve(
        self,
        moe_layer_index: int,
        *,
        fillable: int,
        wanted: int,
        fills: int,
        fills_count: int,
        stats: int,
    ) -> None: ...
    def release(
        self, moe_layer_index: int, *, uses: int, tokens_count: int, kept_count: int
    ) -> None: ...

class ExpertCache:
    def __init__(
        self,
        *,
        bank: BankExperts,
        link: FillLink,
        slots: int,
        slot_of_expert: int,
        expert_of_slot: int,
        slot_key: int,
        demanded_at: int,
        score: int,
        clock: int,
        slots_count: int,
        slots_capacity: int,
        cpu_kernel: bool,
        half_life_ticks: int,
        ticks_per_layer: int,
        fillable: int,
        table_of_layer: int,
        fill_count: int,
        buckets_count: int,
        misses_capacity: int,
    ) -> None: ...
    def prefetch(self, moe_layer_index: int, *, wanted: int) -> None: ...
    def let_go(self) -> None: ...
    def set_kept_count(self, kept_count: int) -> None: ...
    def set_ahead_count(self, ahead_count: int) -> None: ...
    # (layer, bucket, misses, fills, cpu, fill_s, cpu_s, layer_s) of each
    def take_call_times(
        self,
    ) -> list[tuple[int, int, int, int, int, float, float, float]]: ...
    # hits, misses, fills, cpu, evictions
    def layer_counts(self, moe_layer_index: int) -> tuple[int, int, int, int, int]: ...
    @property
    def executions_count(self) -> int: ...
    @property
    def streamed_count(self) -> int: ...
    @property
    def gained_count(self) -> int: ...

class DecodeExperts(ExpertDispatch):
    def __init__(self, cache: ExpertCache) -> None: ...

class SweepExperts(ExpertDispatch):
    def __init__(self, cache: ExpertCache) -> None: ...

class CpuBranch:
    def __init__(
        self,
        executor: Executor,
        bank: BankExperts,
        *,
        x: int,
        ids: int,
        weights: int,
        tokens: int,
        y: int,
        tokens_capacity: int,
        top_k: int,
        ring: int,
        done: int,
    ) -> None: ...
    @staticmethod
    def host_function() -> int: ...
    def task(self, moe_layer_index: int) -> int: ...
    def begin_step(self) -> None: ...
    def end_step(self) -> None: ...
    def take_fault(self) -> str: ...
    @property
    def executions_count(self) -> int: ...
    @property
    def calls_count(self) -> int: ...
    @property
    def busy_s(self) -> float: ...

class FillTotals:
    @property
    def fills_count(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def busy_s(self) -> float: ...

class FillLink:
    def __init__(
        self,
        *,
        bank: int,
        record_bytes: int,
        experts_count: int,
        slots: int,
        slots_capacity: int,
        rate_bytes_per_s: float,
    ) -> None: ...
    def submit(self, fills: int, fills_count: int, slots_count: int) -> int: ...
    def is_done(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> None: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...
    def totals(self) -> FillTotals: ...
    @property
    def rate_bytes_per_s(self) -> float: ...
    def set_rate_bytes_per_s(self, rate_bytes_per_s: float) -> None: ...

def available_isas() -> list[str]: ...
def rows16_bytes(rows: int, columns: int) -> int: ...
def expert_bytes(
    weight_format: str, hidden_size: int, intermediate_size: int, has_bias: bool
) -> int: ...
def matrix_bytes(weight_format: str, rows: int, columns: int) -> int: ...
def pack_rows16(source: int, rows: int, columns: int, packed: int) -> None: ...
def unpack_rows16(packed: int, rows: int, columns: int, target: int) -> None: ...
