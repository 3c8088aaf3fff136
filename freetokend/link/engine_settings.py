"""What an engine is told before it loads anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What control tells a new engine besides its command line (proto `Welcome`).

    0 leaves the choice to the engine for `threads_count`, `kv_bytes`, `max_context_tokens`,
    `slots_count`, `device_bytes` and `sweep_tokens`; `link_bytes_per_s` 0: as fast as memory.
    `layers` is read by `policy.layer_overrides`. `gpu`: the one that was configured, by UUID or
    index, or "". `gpu_fault`: why an engine that need not use a GPU shall do without, or "".
    """

    model: str
    threads_count: int = 0
    kv_bytes: int = 0
    max_running_count: int = 64
    max_waiting_count: int = 256
    step_tokens: int = 512
    max_context_tokens: int = 0
    log_level: str = "info"
    log_format: str = "text"
    pin_pool: bool = True
    backend: str = "auto"
    numerics: str = "exact"
    device: str = "auto"
    slots_count: int = 0
    device_bytes: int = 0
    link_bytes_per_s: int = 0
    preset: str = "auto"
    layers: str = ""
    attention: str = "auto"
    sweep_tokens: int = 0
    gpu: str = ""
    gpu_fault: str = ""
