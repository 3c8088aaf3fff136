"""What the arguments of all verbs share. Light: every call of `freetokenctl` reads it."""

from __future__ import annotations

import argparse
from typing import Final

SOCKET_HELP: Final = (
    "control socket of the daemon (default: FREETOKEN_SOCKET, else the sockets in "
    "this user's runtime directory and in /run/freetokend are tried)"
)

Verbs = argparse._SubParsersAction  # typing name only; argparse has no public one


def add_verb(
    verbs: Verbs[argparse.ArgumentParser], name: str, handler: str, help: str, description: str = ""
) -> argparse.ArgumentParser:
    """A verb; `handler` is MODULE:FUNCTION below freetokend.ctl."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=help, description=description or f"{help[:1].upper()}{help[1:]}."
    )
    parser.set_defaults(handler=handler)
    # Suppressed: without the option here, the one before the verb must stay what it is.
    parser.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help=SOCKET_HELP)
    return parser


def add_output(parser: argparse.ArgumentParser) -> None:
    """Text or JSON."""
    parser.add_argument(
        "-o",
        "--output",
        choices=("text", "json"),
        default="text",
        help="text for people, json for programs (its names are stable)",
    )
