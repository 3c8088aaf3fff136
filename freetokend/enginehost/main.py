"""`freetokend-engine`: the engine process. Started by freetokend, not by hand.

Nothing heavy is imported here: a scripted engine must not load torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine and exit with its code (0: asked to stop); a scripted one returns the code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(one == "--scripted" or one.startswith("--scripted=") for one in arguments):
        from freetokend.scripted.main import main as scripted_main  # noqa: PLC0415

        return scripted_main(arguments)
    parser = argparse.ArgumentParser(
        prog="freetokend-engine",
        description="The engine process of freetokend, which starts it. With --scripted FILE it "
        "follows a script instead of computing (development and tests).",
    )
    parser.add_argument("--link", required=True, metavar="unix:PATH")
    parser.add_argument("--lifeline-fd", type=int, required=True, metavar="N")
    parser.add_argument("--model-dir", type=Path, required=True, metavar="DIR")
    parsed = parser.parse_args(arguments)

    from freetokend.enginehost.process import run_engine  # noqa: PLC0415

    code = run_engine(parsed.link, parsed.lifeline_fd, parsed.model_dir)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything has been said and the pool is not ours: tearing down torch would only keep
    # control waiting (0.5 s, more on a busy machine).
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
