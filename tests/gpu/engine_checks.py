"""A whole engine on the device: converted checkpoint, pool, slots, attention, graphs, tokens."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.gpu.bench import Bench
from tests.gpu.rows import Row, not_run
from tests.support.tiny_checkpoints import write_tiny_qwen3_moe

if TYPE_CHECKING:
    from freetokend.enginehost.cuda_platform import CudaPlatform

PROMPTS: Final = tuple([7 * at % 300 + one for one in range(3 + 5 * at)] for at in range(8))
NEW_TOKENS: Final = 16
# Sums in another order may choose another token where two are as good as each other.
LEAST_EQUAL: Final = 0.7
_CHECK: Final = "tokens of an engine on the device"


def engine(bench: Bench) -> list[Row]:
    """Tokens beside those of an engine on the CPU, for all, three quarters and the fewest slots;
    where there is room for two layers, prompts stream them too."""
    if importlib.util.find_spec("pynvml") is None:
        return [not_run(_CHECK, "nvidia-ml-py", "an engine asks that package for GPUs")]
    # What finds GPUs for an engine is not needed by the rest.
    from freetokend.experts.gpu.device_cache import DeviceCache
    from tests.enginehost.cells import serve_swept
    from tests.enginehost.cpu_platform import engine_on
    from tests.enginehost.local_engine import ask, converted, local_engine, serve

    requests = [ask(str(number), prompt, NEW_TOKENS) for number, prompt in enumerate(PROMPTS)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_qwen3_moe(Path(folder) / "hf", layers=4, mlp_only_layers=(1,))
        directory = converted(Path(folder) / "hf", Path(folder) / "ftw")
        sizes = {"max_context_tokens": 128, "max_running_count": 4}
        with local_engine(directory, **sizes) as built:
            wanted = serve(built, requests).tokens
        experts_count = directory.index.expert_bank.experts_count
        for backend, slots in (
            ("hybrid", 2),
            ("offload", 2),
            ("hybrid", 3 * experts_count // 4),
            ("offload", experts_count),
        ):
            given = {"kv_bytes": 1 << 20, "slots_count": slots, "backend": backend, **sizes}
            with engine_on(_platform(bench), directory, **given) as built:
                found = serve(built, requests).tokens
                assert isinstance(built.cache, DeviceCache)
                if built.cache.can_sweep:
                    swept, _ = serve_swept(built, [], requests)
                    rows.append(_streamed(f"{backend} with {slots} slots", swept.tokens, found))
                differences = len(built.cache.verify().differences)
            whole = sum(len(found[one]) == NEW_TOKENS for one in wanted)
            firsts = sum(found[one][:1] == wanted[one][:1] for one in wanted)
            rows.append(
                Row(
                    check=f"{_CHECK}, {backend} with {slots} slots",
                    measured=f"{whole} whole answers, {firsts} begin as the CPU's, of "
                    f"{len(wanted)}; {differences} slots differ from the pool",
                    gate=f"all, {LEAST_EQUAL:.0%}, 0",
                    passed=whole == len(wanted)
                    and firsts >= LEAST_EQUAL * len(wanted)
                    and differences == 0,
                )
            )
    return rows


def _streamed(where: str, swept: Mapping[str, list[int]], stepped: Mapping[str, list[int]]) -> Row:
    """What streamed prompts are answered, beside the same prompts in steps."""
    whole = sum(len(swept[one]) == NEW_TOKENS for one in stepped)
    firsts = sum(swept[one][:1] == stepped[one][:1] for one in stepped)
    return Row(
        check=f"tokens of streamed prompts, {where}",
        measured=f"{whole} whole answers, {firsts} begin as in steps, of {len(stepped)}",
        gate=f"all, {LEAST_EQUAL:.0%}",
        passed=whole == len(stepped) and firsts >= LEAST_EQUAL * len(stepped),
    )


def _platform(bench: Bench) -> CudaPlatform:
    if bench.kind.driver is not None:
        from freetokend.enginehost.gpu_platform import GpuPlatform

        return GpuPlatform()
    from tests.enginehost.cpu_platform import CpuPlatform

    return CpuPlatform()
