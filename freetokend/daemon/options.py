"""The command line of `freetokend`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from freetokend import __version__
from freetokend.core.config import parse_override
from freetokend.daemon.exit_codes import exit_codes_text

_EPILOG: Final = f"""\
The model is an FTW directory; make one from a Hugging Face checkpoint with
`freetokenctl ftw convert CHECKPOINT DIR`. Without --config, /etc/freetokend/freetokend.toml is
read if it is there.

exit codes (starting again without a change cannot help after 64, 65 and 78):
{exit_codes_text()}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked on the command line. `overrides`: dotted configuration keys to values."""

    config_file: Path | None
    overrides: MappingProxyType[str, object]
    check_config: bool
    script_file: Path | None


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Parse the command line. Raises `ConfigError` for a --set that is not KEY=VALUE; wrong usage
    ends the process as argparse does."""
    parsed = _parser().parse_args(argv)
    overrides: dict[str, object] = {}
    for key, value in (
        ("model.path", parsed.model),
        ("http.port", parsed.port),
        ("http.host", parsed.host),
        ("log.level", parsed.log_level),
    ):
        if value is not None:
            overrides[key] = value
    overrides.update(parse_override(text) for text in parsed.set)
    return Options(
        config_file=parsed.config,
        overrides=MappingProxyType(overrides),
        check_config=parsed.check_config,
        script_file=parsed.scripted,
    )


class _Parser(argparse.ArgumentParser):
    """Wrong usage has the exit status of sysexits(3), as every other error here."""

    def error(self, message: str) -> None:  # type: ignore[override]  # it does not return
        self.print_usage()
        self.exit(64, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="freetokend",
        description="Serves a mixture-of-experts language model on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"freetokend {__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration to use")
    parser.add_argument("--model", metavar="DIR", help="serve this FTW directory")
    parser.add_argument("--port", type=int, metavar="N", help="TCP port of HTTP (0: any free one)")
    parser.add_argument("--host", metavar="ADDRESS", help="address of HTTP (default 127.0.0.1)")
    parser.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='any other key of the configuration, as "engine.kv_bytes=2GiB"',
    )
    parser.add_argument(
        "--check-config", action="store_true", help="check configuration and model, then exit"
    )
    # For development: the model's text side is real, its tokens come from a script.
    parser.add_argument("--scripted", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    return parser
