"""The configuration's schema: every key with its type, range, default and meaning, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from freetokend.core.units import GIB, KIB, MIB, TIB, format_bytes

AUTO: Final = "auto"

TomlScalar = str | int | float | bool


class Kind(StrEnum):
    """What a key's value is; the text is how an error message calls it."""

    STRING = "a string"
    BOOLEAN = "true or false"
    INTEGER = "a whole number"
    SECONDS = "a number of seconds"
    BYTES = 'a number of bytes or a size such as "4GiB"'
    BYTES_PER_S = 'a number of bytes per second or a size such as "4GiB"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key. `default` None: it must be set. `auto`: "auto" is accepted, `resolve` decides."""

    name: str
    kind: Kind
    doc: str
    default: TomlScalar | None
    auto: bool = False
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def table(self) -> str:
        """The TOML table: "http" of "http.port"."""
        return self.name.partition(".")[0]

    @property
    def leaf(self) -> str:
        """The name inside the table: "port" of "http.port"."""
        return self.name.partition(".")[2]

    def allowed(self) -> str:
        """What may be written, for messages and the manual: 'a whole number from 1 to 64'."""
        if self.choices:
            return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        text = self.kind.value
        if self.minimum is not None and self.maximum is not None:
            text += f" from {self._shown(self.minimum)} to {self._shown(self.maximum)}"
        return f'{text}, or "{AUTO}"' if self.auto else text

    def _shown(self, limit: float) -> str:
        match self.kind:
            case Kind.BYTES:
                return format_bytes(limit)
            case Kind.BYTES_PER_S:
                return f"{format_bytes(limit)}/s" if limit else "0"
        return f"{limit:.12g}"


def _string(
    name: str, default: str | None, doc: str, *, auto: bool = False, choices: tuple[str, ...] = ()
) -> Key:
    return Key(name=name, kind=Kind.STRING, doc=doc, default=default, auto=auto, choices=choices)


def _number(
    name: str,
    kind: Kind,
    default: TomlScalar,
    limits: tuple[float, float],
    doc: str,
    *,
    auto: bool = False,
) -> Key:
    low, high = limits
    return Key(name=name, kind=kind, doc=doc, default=default, auto=auto, minimum=low, maximum=high)


LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_KEYS: Final = (
    _string(
        "model.path",
        None,
        "FTW directory of the model, as `freetokenctl ftw convert` makes it.",
    ),
    _string(
        "model.id",
        "",
        "Name under which clients ask for the model; empty: the directory's name.",
    ),
    _string(
        "service.ready",
        "token",
        'When the service reports ready: "token" (one can be produced) or "listening" (at once).',
        choices=("token", "listening"),
    ),
    _number(
        "service.drain_timeout_s",
        Kind.SECONDS,
        30,
        (0, 3600),
        "How long a stop waits for running requests before it ends them.",
    ),
    _string(
        "service.state_dir",
        AUTO,
        "Directory for what must survive a restart.",
        auto=True,
    ),
    _string(
        "service.runtime_dir",
        AUTO,
        "Directory for sockets; it may be deleted while the service is stopped.",
        auto=True,
    ),
    _string(
        "http.host",
        "127.0.0.1",
        "Address of the HTTP interface; anything but loopback opens it to the network.",
    ),
    _number(
        "http.port",
        Kind.INTEGER,
        8440,
        (0, 65535),
        "TCP port of the HTTP interface; 0: any free port, shown by `freetokenctl status`.",
    ),
    _number(
        "http.max_body_bytes",
        Kind.BYTES,
        8 * MIB,
        (KIB, GIB),
        "Largest request body; larger ones are refused with 413.",
    ),
    _string(
        "control.admin_socket",
        AUTO,
        "Unix socket for reading and changing (mode 0660).",
        auto=True,
    ),
    _string(
        "control.monitor_socket",
        AUTO,
        "Unix socket for reading only (mode 0666).",
        auto=True,
    ),
    _string(
        "control.admin_group",
        "",
        "Group that owns the admin socket; empty: the daemon's own group.",
    ),
    _string(
        "control.gpu",
        AUTO,
        "The GPU whose memory, link and clocks are watched: its UUID, or its index as the driver "
        "counts.",
        auto=True,
    ),
    _number(
        "control.tick_s",
        Kind.SECONDS,
        0.25,
        (0.05, 60),
        "Time between two looks at the machine: GPU, memory, pressure and load.",
    ),
    _number(
        "control.profile_interval_s",
        Kind.SECONDS,
        600,
        (0, 604800),
        "Time between two measurements of bandwidths while nobody is served; 0: only where nothing "
        "is known of what is served.",
    ),
    Key(
        name="elastic.enabled",
        kind=Kind.BOOLEAN,
        doc="Let the expert cache follow what other programs leave of the GPU's memory; false: it "
        "is resized at the operator's word only.",
        default=True,
    ),
    _number(
        "elastic.cushion_bytes",
        Kind.BYTES,
        AUTO,
        (MIB, TIB),
        "Memory of the GPU kept free for what others take between two looks.",
        auto=True,
    ),
    _number(
        "elastic.margin_bytes",
        Kind.BYTES,
        AUTO,
        (MIB, TIB),
        "What must be free beyond the cushion before the cache grows.",
        auto=True,
    ),
    _number(
        "elastic.growth_step_bytes",
        Kind.BYTES,
        AUTO,
        (MIB, TIB),
        "A growth by less is not worth one.",
        auto=True,
    ),
    _number(
        "elastic.hold_s",
        Kind.SECONDS,
        30,
        (0.1, 3600),
        "For how long there must be room before the cache grows; doubled after each growth that "
        "was taken back at once.",
    ),
    _number(
        "elastic.window_s",
        Kind.SECONDS,
        60,
        (1, 3600),
        "Time within which the cache is resized at most six times; growth, sessions and the "
        "operator may use up a part of these.",
    ),
    _number(
        "elastic.vram_limit_bytes",
        Kind.BYTES,
        AUTO,
        (MIB, TIB),
        "The most that the engine holds of the GPU's memory.",
        auto=True,
    ),
    _string(
        "elastic.floor",
        "one-token",
        "What the cache never shrinks below: the experts of one token, or those of one layer.",
        choices=("one-token", "layer"),
    ),
    _string(
        "elastic.process_rules",
        "",
        "How much of the GPU's memory stays free while a program of that name holds some of it: "
        '"blender=8GiB,steam=4GiB".',
    ),
    _string(
        "elastic.windows",
        "",
        "When memory stays free, or the engine sleeps while nobody wants it: "
        '"evening fri-sun 18:00-23:30 keep=8GiB; night 23:30-07:00 sleep".',
    ),
    _number(
        "elastic.sleep_idle_s",
        Kind.SECONDS,
        0,
        (0, 604800),
        "Give the GPU back after so long without a request; the next one wakes the engine. "
        "0: never.",
    ),
    Key(
        name="elastic.sleep_over_budget",
        kind=Kind.BOOLEAN,
        doc="Give the GPU back, once no request runs, where even the floor is more than others "
        "leave.",
        default=False,
    ),
    _string(
        "engine.backend",
        AUTO,
        "What computes the model: every expert in a slot of the device (fused), the missing ones "
        "filled (offload), split between fills and the CPU (hybrid), or the CPU alone (cpu).",
        choices=(AUTO, "fused", "offload", "hybrid", "cpu"),
        auto=True,
    ),
    _string(
        "engine.device",
        AUTO,
        'Where the slots of the expert cache are: an NVIDIA GPU (cuda), or none. "auto" takes a '
        "GPU that computes what the CPU does when the engine starts, and else the CPU serves and "
        'says why. "host", ordinary memory in the place of a GPU, is for development; it is never '
        "chosen by itself.",
        choices=(AUTO, "cuda", "host", "none"),
        auto=True,
    ),
    _number(
        "engine.slots_count",
        Kind.INTEGER,
        AUTO,
        (1, 2**24),
        "Experts that the cache holds; met exactly or refused with the arithmetic.",
        auto=True,
    ),
    _number(
        "engine.device_bytes",
        Kind.BYTES,
        AUTO,
        (MIB, TIB),
        'Memory that stands for that of a GPU, with device = "host".',
        auto=True,
    ),
    _number(
        "engine.link_bytes_per_s",
        Kind.BYTES_PER_S,
        0,
        (0, TIB),
        'Rate of the link to the device, with device = "host"; 0: as fast as memory.',
    ),
    _string(
        "engine.preset",
        AUTO,
        "What the device's memory is for: little of it (minimum), many experts (chat), or long "
        "contexts (agent).",
        choices=(AUTO, "minimum", "chat", "agent"),
        auto=True,
    ),
    _string(
        "engine.layers",
        "",
        "What misses of single MoE layers do whatever the others' do, counted from 0: "
        '"0-3=cpu,7=fill".',
    ),
    _string(
        "engine.attention",
        AUTO,
        "Whose kernels attend on a GPU: FlashInfer's for prompts and Triton's for the rest, or "
        'Triton\'s alone; "auto" is FlashInfer where it works.',
        choices=(AUTO, "flashinfer", "triton"),
        auto=True,
    ),
    _number(
        "engine.sweep_tokens",
        Kind.INTEGER,
        AUTO,
        (1, 2**20),
        "Most prompt tokens computed while the layers' experts pass through the cache once.",
        auto=True,
    ),
    _number(
        "engine.threads",
        Kind.INTEGER,
        AUTO,
        (1, 1024),
        "Threads of the CPU executor.",
        auto=True,
    ),
    _string(
        "engine.numerics",
        "exact",
        'How products are computed: "exact", or "fast" with activations rounded to int8.',
        choices=("exact", "fast"),
    ),
    _number(
        "engine.kv_bytes",
        Kind.BYTES,
        AUTO,
        (MIB, TIB),
        "Memory for attention keys and values of all running requests.",
        auto=True,
    ),
    _number(
        "engine.max_context_tokens",
        Kind.INTEGER,
        AUTO,
        (16, 2**24),
        "Longest prompt plus answer that one request may have.",
        auto=True,
    ),
    _number(
        "engine.max_running_count",
        Kind.INTEGER,
        64,
        (1, 1024),
        "Requests computed together.",
    ),
    _number(
        "engine.max_waiting_count",
        Kind.INTEGER,
        256,
        (0, 65536),
        "Requests that may wait for a place; more are refused with 429.",
    ),
    _number(
        "engine.step_tokens",
        Kind.INTEGER,
        512,
        (1, 65536),
        "Tokens computed in one step, prompt chunks and answers together.",
    ),
    _number(
        "engine.restart_budget_count",
        Kind.INTEGER,
        5,
        (0, 1000),
        "Engine restarts within restart_window_s before the service gives up.",
    ),
    _number(
        "engine.restart_window_s",
        Kind.SECONDS,
        300,
        (1, 86400),
        "Time over which restart_budget_count counts.",
    ),
    Key(
        name="engine.pin_pool",
        kind=Kind.BOOLEAN,
        doc="Keep the model's weights from being swapped out.",
        default=True,
    ),
    _string(
        "pool.directory",
        AUTO,
        "Directory on a tmpfs mounted with huge=advise for the weights in memory; empty: a memfd.",
        auto=True,
    ),
    _number(
        "pool.max_bytes",
        Kind.BYTES,
        AUTO,
        (MIB, 1024 * TIB),
        "Most memory that the model's weights may take.",
        auto=True,
    ),
    _string("log.level", "info", "Least severe line that is logged.", choices=LOG_LEVELS),
    _string(
        "log.format",
        AUTO,
        'How lines look: "text" for people, "journal" with priority prefixes for systemd.',
        choices=(AUTO, "text", "journal"),
        auto=True,
    ),
)

SCHEMA: Final[Mapping[str, Key]] = MappingProxyType({key.name: key for key in _KEYS})
TABLES: Final[tuple[str, ...]] = tuple(dict.fromkeys(key.table for key in _KEYS))
