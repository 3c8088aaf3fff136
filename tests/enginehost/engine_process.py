"""The real `freetokend-engine` under a real supervisor, on a tiny model."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from freetokend.ftw.reader import FtwDirectory
from freetokend.link.handover import PoolHandover
from freetokend.link.messages import EngineSettings
from tests.enginehost.local_engine import new_pool
from tests.support.scripted import EngineHarness, supervised


def engine_argv(model_dir: Path) -> tuple[str, ...]:
    """To which the supervisor adds the link and the lifeline."""
    return (sys.executable, "-m", "freetokend.enginehost.main", "--model-dir", str(model_dir))


@asynccontextmanager
async def native_engine(
    directory: FtwDirectory, *, settings: EngineSettings | None = None, **options: Any
) -> AsyncIterator[EngineHarness]:
    """An engine process over a new pool for `directory`."""
    with tempfile.TemporaryDirectory(prefix="ftk-") as name, new_pool(directory) as pool:
        async with supervised(
            engine_argv(directory.path),
            directory=Path(name),
            settings=settings or EngineSettings(model="tiny", max_running_count=4),
            pool=PoolHandover(name=pool.name, length_bytes=pool.length_bytes, fd=pool.fd),
            **options,
        ) as harness:
            yield harness
