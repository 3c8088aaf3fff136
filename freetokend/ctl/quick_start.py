"""What lets `freetokenctl status` answer at once: nothing is imported that nobody asks."""

from __future__ import annotations

import gc
import importlib
import sys
import types
from typing import Final

# Imported by gRPC, protobuf and logging, and not used by a client of one call on a Unix socket.
_SELDOM_USED: Final = (
    "asyncio",
    "google.protobuf.text_format",
    "grpc.aio",
    "inspect",
    "traceback",
)
# Imports make tens of thousands of objects that all stay: looking through them again and again
# for garbage takes a tenth of the start.
_GC_THRESHOLD_COUNT: Final = 100_000


class _OnUse(types.ModuleType):
    """Stands in for a module; the module itself is imported when something of it is wanted."""

    def __getattr__(self, name: str) -> object:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_on_use(*names: str) -> None:
    """From now on `import` of these modules takes no time; those already imported stay."""
    for name in names:
        sys.modules.setdefault(name, _OnUse(name))


def spare_imports() -> None:
    """For a process that asks a daemon one thing and ends; call before gRPC is imported."""
    gc.set_threshold(_GC_THRESHOLD_COUNT)
    import_on_use(*_SELDOM_USED)
