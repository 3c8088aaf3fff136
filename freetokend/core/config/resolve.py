"""asked + facts -> decided. Pure: the same inputs give the same configuration and reasons."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Final

from freetokend.core.config.asked import DEFAULT, Config, Origin, Setting
from freetokend.core.config.facts import EnvironmentFacts
from freetokend.core.config.resolved import (
    ControlConfig,
    ElasticConfig,
    EngineConfig,
    HttpConfig,
    LogConfig,
    ModelConfig,
    PoolConfig,
    ResolvedConfig,
    ResolvedValue,
    ServiceConfig,
)
from freetokend.core.config.schema import AUTO, SCHEMA, Kind, TomlScalar
from freetokend.core.errors import ConfigError
from freetokend.core.host_facts import cpu_limit
from freetokend.core.runtime_dir import ADMIN_SOCKET_NAME, MONITOR_SOCKET_NAME

# sun_path holds 108 bytes with its closing zero.
_SOCKET_PATH_LIMIT_BYTES: Final = 107


def resolve(config: Config, facts: EnvironmentFacts) -> ResolvedConfig:
    """Decides every "auto" and checks what one key alone cannot tell.

    Relative paths of a file are taken from that file's directory, those of the command line from
    the working directory. Raises `ConfigError` with every problem found.
    """
    decision = _Decision(config, facts)
    decision.model()
    decision.service()
    decision.control()
    decision.elastic()
    decision.engine()
    decision.expert_cache()
    decision.pool_and_log()
    decision.across_keys()
    if decision.problems:
        raise ConfigError(
            "\n".join(sentence for _, sentence in decision.problems),
            param=decision.problems[0][0],
        )
    return _built(decision.values, decision.details())


class _Decision:
    """The values decided so far; filled table by table, read once."""

    def __init__(self, config: Config, facts: EnvironmentFacts) -> None:
        self._config = config
        self._facts = facts
        self._reasons: dict[str, str] = {}
        self._left: set[str] = set()
        self.problems: list[tuple[str, str]] = []
        self.values: dict[str, TomlScalar] = {
            key: setting.value for key, setting in config.settings.items()
        }

    def details(self) -> tuple[ResolvedValue, ...]:
        """One line per key of the schema; what is left to the engine is still "auto" there."""
        return tuple(
            ResolvedValue(
                key=key,
                value=toml_literal(AUTO if key in self._left else self.values[key]),
                origin=str(self._setting(key).origin),
                reason=self._reasons.get(key, ""),
            )
            for key in SCHEMA
        )

    def model(self) -> None:
        """The model's directory and public name."""
        setting = self._config.get("model.path")
        path = "" if setting is None else str(setting.value)
        if path:
            path = self._absolute(path, self._setting("model.path").origin)
        else:
            self._refuse(
                "model.path",
                'no model is configured: write path = "/directory/of/the/model" under [model], '
                "or start with --model DIR",
            )
        self._set("model.path", path)
        if not self.values["model.id"] and path:
            self._set("model.id", posixpath.basename(path), "the directory's name")

    def service(self) -> None:
        """Directories of the service."""
        facts = self._facts
        self._directory("service.state_dir", facts.state_dir, facts.state_dir_reason)
        self._directory("service.runtime_dir", facts.runtime_dir, facts.runtime_dir_reason)

    def control(self) -> None:
        """The two sockets; too long a path is refused here rather than by bind()."""
        runtime_dir = str(self.values["service.runtime_dir"])
        for key, name in (
            ("control.admin_socket", ADMIN_SOCKET_NAME),
            ("control.monitor_socket", MONITOR_SOCKET_NAME),
        ):
            self._directory(key, posixpath.join(runtime_dir, name), "in service.runtime_dir")
            path = str(self.values[key])
            if len(path.encode()) > _SOCKET_PATH_LIMIT_BYTES:
                self._refuse(
                    key,
                    f"the socket's path {path} has {len(path.encode())} bytes and Linux allows "
                    f"{_SOCKET_PATH_LIMIT_BYTES}; shorten {key} or service.runtime_dir",
                )
        if self._is_auto("control.gpu"):
            self._leave("control.gpu", "the one that the engine uses, else the only one")
        elif not self.values["control.gpu"]:
            self._refuse(
                "control.gpu", f'control.gpu is empty; write a UUID, an index, or "{AUTO}"'
            )

    def elastic(self) -> None:
        """What the size of the card decides."""
        for leaf, reason in (
            ("cushion_bytes", "1.5 GiB, or a share of a card with less than 8 GiB"),
            ("margin_bytes", "512 MiB, or a share of a card with less than 8 GiB"),
            ("growth_step_bytes", "256 MiB, or a share of a card with less than 8 GiB"),
            ("vram_limit_bytes", "no limit"),
        ):
            key = f"elastic.{leaf}"
            if self._is_auto(key):
                self._leave(key, reason)

    def engine(self) -> None:
        """Device, backend, threads and what is left to the engine."""
        self._device()
        self._backend()
        self._threads()
        if self._is_auto("engine.kv_bytes"):
            self._leave(
                "engine.kv_bytes",
                "sized by the engine from the model's bytes per token and the free memory",
            )
        if self._is_auto("engine.max_context_tokens"):
            self._leave(
                "engine.max_context_tokens",
                "as long as the model and the memory for keys and values allow",
            )

    def _device(self) -> None:
        """What can be known before the engine has asked the driver. Never "host" by itself."""
        if not self._is_auto("engine.device"):
            return
        driver = self._facts.nvidia_driver
        if self.values["engine.backend"] == "cpu":
            self._set("engine.device", "none", 'engine.backend = "cpu" uses no device')
        elif driver:
            self._leave(
                "engine.device",
                f"an NVIDIA driver ({driver}) is loaded; the engine takes a GPU that the driver "
                "names and that computes what the CPU does; see freetokenctl status",
            )
        else:
            self._set("engine.device", "none", self._why_no_device())

    def _backend(self) -> None:
        backend, device = self.values["engine.backend"], self.values["engine.device"]
        if backend == AUTO:
            if device == "none":
                self._set("engine.backend", "cpu", self._why_no_device())
            else:
                self._leave(
                    "engine.backend",
                    "the one with the least estimated time per token; see freetokenctl status",
                )
        elif backend == "cpu" and device not in ("none", AUTO):
            self._refuse(
                "engine.device",
                f'engine.device = "{device}" is used by no expert cache with engine.backend = '
                f'"cpu"; remove the one, or set the other to "auto"',
            )
        elif backend != "cpu" and device == "none":
            self._refuse(
                "engine.backend",
                f'engine.backend = "{backend}" needs a device, and there is none: '
                f'{self._why_no_device()}. Set engine.backend = "auto" or "cpu"; for development, '
                'engine.device = "host" puts ordinary memory in the place of a GPU',
            )

    def _why_no_device(self) -> str:
        if self._config.settings["engine.device"].value == "none":
            return 'engine.device = "none"'
        if self._facts.nvidia_cards:
            cards = ", ".join(self._facts.nvidia_cards)
            return f"an NVIDIA GPU (PCI {cards}) is present, but no NVIDIA driver is loaded"
        return "no NVIDIA GPU is present"

    def expert_cache(self) -> None:
        """Sizes of the expert cache, and what means something with one kind of device only."""
        self._only_with_a_cache()
        self._only_on_the_host_device()
        self._only_on_a_gpu()
        unused = ""
        if self.values["engine.backend"] == "cpu":
            unused = 'not used: engine.backend = "cpu" has no expert cache'
        unused_bytes = unused
        if self.values["engine.device"] != "host":
            unused_bytes = unused or 'not used: only the device "host" has a memory of any size'
        for key, reason in (
            (
                "engine.slots_count",
                unused or "as many experts as the device's memory has room for",
            ),
            ("engine.device_bytes", unused_bytes or "sized by the engine for the model"),
            (
                "engine.preset",
                unused or "experts and contexts grow together with the device's memory",
            ),
            (
                "engine.sweep_tokens",
                unused or "sized by the engine from the memory for one computation",
            ),
            ("engine.attention", self._why_no_gpu() or "FlashInfer where it works"),
        ):
            if self._is_auto(key):
                self._leave(key, reason)

    def _why_no_gpu(self) -> str:
        """Where a GPU may be used, which is what "auto" still means here, nothing."""
        may_be = self.values["engine.device"] in ("cuda", AUTO)
        on_gpu = may_be and self.values["engine.backend"] != "cpu"
        return "" if on_gpu else "not used: attention is computed by the CPU"

    def _only_with_a_cache(self) -> None:
        if self.values["engine.backend"] != "cpu":
            return
        why = self._reasons.get("engine.backend", "as configured")
        for leaf in ("slots_count", "preset", "sweep_tokens", "layers"):
            key = f"engine.{leaf}"
            if self.values[key] not in (AUTO, ""):
                self._refuse(
                    key,
                    f"{key} = {toml_literal(self.values[key])} is for an expert cache, which "
                    f'engine.backend = "cpu" ({why}) does not have; remove {key}, or choose '
                    "another backend",
                )

    def _only_on_a_gpu(self) -> None:
        attention = self.values["engine.attention"]
        if attention != AUTO and self._why_no_gpu():
            self._refuse(
                "engine.attention",
                f'engine.attention = "{attention}" is for a GPU, and engine.device is '
                f'"{self.values["engine.device"]}", engine.backend '
                f'"{self.values["engine.backend"]}"; remove engine.attention',
            )

    def _only_on_the_host_device(self) -> None:
        if self.values["engine.device"] == "host":
            return
        for key in ("engine.device_bytes", "engine.link_bytes_per_s"):
            value = self.values[key]
            if value not in (0, AUTO):
                self._refuse(
                    key,
                    f'{key} = {value} describes the device "host" and engine.device is '
                    f'"{self.values["engine.device"]}"; remove {key}, or (for development) set '
                    'engine.device = "host"',
                )

    def _threads(self) -> None:
        facts = self._facts
        allowed = cpu_limit(facts.allowed_cpus_count, facts.cpu_quota_count)
        limit, limit_reason = allowed.count, allowed.reason
        if self._is_auto("engine.threads"):
            cores = max(1, facts.physical_cores_count)
            if cores <= limit:
                self._set("engine.threads", cores, "one per physical core of the allowed CPUs")
            else:
                self._set("engine.threads", limit, limit_reason)
            return
        asked = self._integer("engine.threads")
        if asked > limit:
            self._set("engine.threads", limit, f"{asked} were asked for, but {limit_reason}")

    def pool_and_log(self) -> None:
        """Where the weights lie, how much they may take, and how lines look."""
        facts = self._facts
        if self._is_auto("pool.directory"):
            if facts.huge_tmpfs_dir is None:
                self._set("pool.directory", "", "a memfd: no tmpfs for the pool is mounted")
            else:
                self._set("pool.directory", facts.huge_tmpfs_dir, "a tmpfs with huge pages")
        elif self.values["pool.directory"]:
            self._directory("pool.directory", "", "")
        if self._is_auto("pool.max_bytes"):
            self._leave("pool.max_bytes", "as much as is free at the start, less a headroom")
        if self._is_auto("log.format"):
            journal = facts.stderr_is_journal
            self._set(
                "log.format",
                "journal" if journal else "text",
                "standard error is the journal" if journal else "standard error is no journal",
            )

    def across_keys(self) -> None:
        """Rules between keys."""
        step, running = (
            self._integer("engine.step_tokens"),
            self._integer("engine.max_running_count"),
        )
        if step < running:
            self._refuse(
                "engine.step_tokens",
                f"engine.step_tokens = {step} cannot carry one token for each of "
                f"engine.max_running_count = {running} requests; raise the one or lower the other",
            )
        if self.values["control.admin_socket"] == self.values["control.monitor_socket"]:
            self._refuse(
                "control.admin_socket",
                "control.admin_socket and control.monitor_socket are the same path; the monitor "
                "socket is open to everybody, so they must differ",
            )

    def _setting(self, key: str) -> Setting:
        return self._config.get(key) or Setting(key=key, value="", origin=DEFAULT)

    def _is_auto(self, key: str) -> bool:
        return self.values[key] == AUTO

    def _integer(self, key: str) -> int:
        value = self.values[key]
        assert isinstance(value, int)
        return value

    def _set(self, key: str, value: TomlScalar, reason: str = "") -> None:
        self.values[key] = value
        if reason:
            self._reasons[key] = reason

    def _leave(self, key: str, reason: str) -> None:
        """Nothing is decided here; shown as "auto", so that what is shown can be read back.

        A number becomes 0, a text stays "auto".
        """
        self._set(key, AUTO if SCHEMA[key].kind is Kind.STRING else 0, reason)
        self._left.add(key)

    def _refuse(self, key: str, sentence: str) -> None:
        origin = self._setting(key).origin
        where = "" if origin is DEFAULT else f"{origin}: "
        self.problems.append((key, where + sentence))

    def _directory(self, key: str, automatic: str, reason: str) -> None:
        if self._is_auto(key):
            self._set(key, automatic, reason)
        elif not self.values[key]:
            self._refuse(key, f'{key} is empty; write a path, or "auto"')
        else:
            self._set(key, self._absolute(str(self.values[key]), self._setting(key).origin))

    def _absolute(self, path: str, origin: Origin) -> str:
        if path == "~" or path.startswith("~/"):
            path = self._facts.home_dir + path[1:]
        base = self._facts.working_dir
        if origin.file is not None:
            base = posixpath.join(base, posixpath.dirname(origin.file))
        return posixpath.normpath(posixpath.join(base, path))


def toml_literal(value: TomlScalar) -> str:
    """`value` as TOML text."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return '"' + "".join(_escaped(character) for character in escaped) + '"'
        case _:
            return repr(value)


def _escaped(character: str) -> str:
    control = ord(character) < 0x20 or ord(character) == 0x7F
    return f"\\u{ord(character):04x}" if control else character


def _built(values: Mapping[str, TomlScalar], details: tuple[ResolvedValue, ...]) -> ResolvedConfig:
    def text(key: str) -> str:
        return str(values[key])

    def count(key: str) -> int:
        return int(values[key])

    return ResolvedConfig(
        model=ModelConfig(path=text("model.path"), id=text("model.id")),
        service=ServiceConfig(
            ready=text("service.ready"),
            drain_timeout_s=float(values["service.drain_timeout_s"]),
            state_dir=text("service.state_dir"),
            runtime_dir=text("service.runtime_dir"),
        ),
        http=HttpConfig(
            host=text("http.host"),
            port=count("http.port"),
            max_body_bytes=count("http.max_body_bytes"),
        ),
        control=ControlConfig(
            admin_socket=text("control.admin_socket"),
            monitor_socket=text("control.monitor_socket"),
            admin_group=text("control.admin_group"),
            gpu=text("control.gpu"),
            tick_s=float(values["control.tick_s"]),
            profile_interval_s=float(values["control.profile_interval_s"]),
        ),
        elastic=_elastic(values),
        engine=EngineConfig(
            backend=text("engine.backend"),
            device=text("engine.device"),
            slots_count=count("engine.slots_count"),
            device_bytes=count("engine.device_bytes"),
            link_bytes_per_s=count("engine.link_bytes_per_s"),
            preset=text("engine.preset"),
            layers=text("engine.layers"),
            attention=text("engine.attention"),
            sweep_tokens=count("engine.sweep_tokens"),
            threads=count("engine.threads"),
            numerics=text("engine.numerics"),
            kv_bytes=count("engine.kv_bytes"),
            max_context_tokens=count("engine.max_context_tokens"),
            max_running_count=count("engine.max_running_count"),
            max_waiting_count=count("engine.max_waiting_count"),
            step_tokens=count("engine.step_tokens"),
            restart_budget_count=count("engine.restart_budget_count"),
            restart_window_s=float(values["engine.restart_window_s"]),
            pin_pool=bool(values["engine.pin_pool"]),
        ),
        pool=PoolConfig(directory=text("pool.directory"), max_bytes=count("pool.max_bytes")),
        log=LogConfig(level=text("log.level"), format=text("log.format")),
        details=details,
    )


def _elastic(values: Mapping[str, TomlScalar]) -> ElasticConfig:
    def size(leaf: str) -> int:
        return int(values[f"elastic.{leaf}"])

    return ElasticConfig(
        enabled=bool(values["elastic.enabled"]),
        cushion_bytes=size("cushion_bytes"),
        margin_bytes=size("margin_bytes"),
        growth_step_bytes=size("growth_step_bytes"),
        hold_s=float(values["elastic.hold_s"]),
        window_s=float(values["elastic.window_s"]),
        vram_limit_bytes=size("vram_limit_bytes"),
        floor=str(values["elastic.floor"]),
        process_rules=str(values["elastic.process_rules"]),
        windows=str(values["elastic.windows"]),
        sleep_idle_s=float(values["elastic.sleep_idle_s"]),
        sleep_over_budget=bool(values["elastic.sleep_over_budget"]),
    )
