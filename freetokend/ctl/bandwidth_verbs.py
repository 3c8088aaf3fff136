"""The arguments of `freetokenctl bandwidth`."""

from __future__ import annotations

import argparse

from freetokend.ctl.arguments import Verbs, add_output, add_verb


def add_bandwidth(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """bandwidth run, bandwidth show."""
    bandwidth = verbs.add_parser("bandwidth", help="measure and show what the machine reaches")
    bandwidth_verbs = bandwidth.add_subparsers(dest="bandwidth_verb", required=True, metavar="VERB")
    run = add_verb(
        bandwidth_verbs,
        "run",
        "bandwidth:run",
        "measure the bandwidths of memory, CPU, link and disk now",
        "Measures with the deployed experts while nobody is served: memory, the executor by its "
        "threads, fills, both at once, the disk. A request ends it at once: exit code 75, with "
        "what was measured until then. The figures are kept; see `bandwidth show`.",
    )
    run.add_argument(
        "parts", nargs="*", metavar="PART", help="memory, cpu, fill, pair or disk (default: all)"
    )
    run.add_argument(
        "--limit",
        type=float,
        default=10.0,
        metavar="S",
        dest="limit_s",
        help="seconds of work at most, up to 60 (default: %(default)s)",
    )
    add_output(run)
    add_output(
        add_verb(
            bandwidth_verbs,
            "show",
            "bandwidth:show",
            "show the bandwidths that are known, with source and age",
            "Shows every figure that was measured, when and at whose word, and what the steps "
            "that are served tell now.",
        )
    )
