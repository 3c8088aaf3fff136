"""The configuration as decided: no "auto" is left, and every decision has its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedValue:
    """One key for people: `value` is TOML text, `reason` says why an "auto" became it."""

    key: str
    value: str
    origin: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`path` is absolute, `id` never empty."""

    path: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Absolute directories; `ready` is "token" or "listening"."""

    ready: str
    drain_timeout_s: float
    state_dir: str
    runtime_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where HTTP listens; port 0 means any free one."""

    host: str
    port: int
    max_body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """Absolute socket paths; `admin_group` "" leaves the daemon's own group. `gpu`: a UUID, an
    index, or "auto": the one that the engine uses, else the only one."""

    admin_socket: str
    monitor_socket: str
    admin_group: str
    gpu: str
    tick_s: float
    profile_interval_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """`cushion_bytes`, `margin_bytes` and `growth_step_bytes` are 0 where the size of the card
    decides, `vram_limit_bytes` where there is no limit; `sleep_idle_s` 0: never.

    `process_rules` and `windows` are read by `policy.elastic_rules`.
    """

    enabled: bool
    cushion_bytes: int
    margin_bytes: int
    growth_step_bytes: int
    hold_s: float
    window_s: float
    vram_limit_bytes: int
    floor: str
    process_rules: str
    windows: str
    sleep_idle_s: float
    sleep_over_budget: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """0 for `kv_bytes`, `max_context_tokens`, `slots_count`, `device_bytes` and `sweep_tokens`,
    and "auto" for `backend`, `device`, `preset` and `attention`: the engine decides once it knows
    model and machine. `link_bytes_per_s` 0: as fast as memory.

    `numerics` is "exact" or "fast"; `layers` is read by `policy.layer_overrides`.
    """

    backend: str
    device: str
    slots_count: int
    device_bytes: int
    link_bytes_per_s: int
    preset: str
    layers: str
    attention: str
    sweep_tokens: int
    threads: int
    numerics: str
    kv_bytes: int
    max_context_tokens: int
    max_running_count: int
    max_waiting_count: int
    step_tokens: int
    restart_budget_count: int
    restart_window_s: float
    pin_pool: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """`directory` "": a memfd. `max_bytes` 0: no limit is known."""

    directory: str
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """`format` is "text" or "journal"."""

    level: str
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """All tables, named as in the file, and the same values for display in `details`."""

    model: ModelConfig
    service: ServiceConfig
    http: HttpConfig
    control: ControlConfig
    elastic: ElasticConfig
    engine: EngineConfig
    pool: PoolConfig
    log: LogConfig
    details: tuple[ResolvedValue, ...]

    def values(self) -> list[ResolvedValue]:
        """Every key in the order of the schema."""
        return list(self.details)
