"""Conversion of a Hugging Face checkpoint into an FTW directory.

Everything is written into a temporary directory beside the target, synced, and renamed into place
at the end, so a target directory is complete or does not exist. What a conversion that was
interrupted has finished is taken over by the next one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from freetokend.core.errors import InvalidInputError, ModelDataError, Reason, ResourceError
from freetokend.core.model_config import supported_architectures
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.contents import (
    FORMAT_VERSION,
    LAYOUT_VERSION,
    DenseError,
    FtwIndex,
    LayerError,
    Quantisation,
    ShardEntry,
    content_identity,
)
from freetokend.ftw.families import layer_of
from freetokend.ftw.index import read_index
from freetokend.ftw.journal import Journal, Progress, Task, finished_bytes, read_progress
from freetokend.ftw.layer_errors import ErrorLedger
from freetokend.ftw.layout import BLOCK_BYTES, TensorEntry, plan_region
from freetokend.ftw.model import ModelSource, Wanted
from freetokend.ftw.pieces import MadePiece, Piece, make_piece, region_pieces, same_values
from freetokend.ftw.quantise import QUANTISER_VERSION
from freetokend.ftw.schemes.registry import open_scheme
from freetokend.ftw.target import Target, copy_side_files, side_file_bytes
from freetokend.ftw.threads import threads_to_use
from freetokend.ftw.writer import RegionWriter

AS_IT_COMES: Final = Wanted()
DEFAULT_SHARD_BYTES: Final = 4 * 1024 * 1024 * 1024
_SHOWN_COUNT: Final = 5
# Index, copied files and the file system's own tables, beside the region.
_SLACK_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertProgress:
    """How far a conversion is. note: a sentence for the user, or "" for a plain step."""

    done_bytes: int
    total_bytes: int
    note: str = ""


def convert(
    source_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    progress: Callable[[ConvertProgress], None] = lambda _: None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    force: bool = False,
    threads_count: int | None = None,
    wanted: Wanted = AS_IT_COMES,
) -> FtwIndex:
    """Convert the checkpoint in `source_dir` into the FTW directory `out_dir`.

    `max_shard_bytes` is rounded down to 64 MiB; `force` replaces an FTW directory that came from
    something else; `progress` is called from the calling thread; `wanted` says into which formats
    weights are quantised. Returns the index that was written, or the one found when `out_dir` is
    already this conversion.
    ModelDataError: the source is damaged, unknown or changed. InvalidInputError: the target is in
    the way. ResourceError: not enough space (both numbers), or the disk failed; calling again
    resumes.
    """
    if max_shard_bytes < BLOCK_BYTES:
        raise InvalidInputError(
            f"shards of {max_shard_bytes} bytes are too small; the least is {BLOCK_BYTES}.",
            param="max_shard_bytes",
        )
    threads = threads_to_use(threads_count)
    target = Target(Path(source_dir), Path(out_dir))
    try:
        with Checkpoint(source_dir) as checkpoint:
            conversion = _Conversion(checkpoint, target, max_shard_bytes, progress, wanted)
            if not conversion.is_done(force=force):
                with target.locked():
                    conversion.run(threads)
    except OSError as error:
        _raise_disk_error(error, target)
    index = read_index(out_dir)
    if index.architecture not in supported_architectures():
        note = (
            f"{index.architecture} is converted but not served yet: this version serves "
            f"{', '.join(supported_architectures())} and refuses others by name."
        )
        done = index.region_bytes
        progress(ConvertProgress(done_bytes=done, total_bytes=done, note=note))
    return index


class _Conversion:
    """One checkpoint on its way into one target."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        max_shard_bytes: int,
        progress: Callable[[ConvertProgress], None],
        wanted: Wanted,
    ) -> None:
        self._checkpoint = checkpoint
        self._scheme = open_scheme(checkpoint)
        self._source = ModelSource(checkpoint, self._scheme, wanted)
        self._plan = plan_region(
            [spec for spec, _ in self._source.tensors],
            self._source.bank_spec(),
            max_shard_bytes=max_shard_bytes,
        )
        self._target = target
        self._progress = progress
        self._errors = ErrorLedger(())

    def is_done(self, *, force: bool) -> bool:
        """Whether the target already holds this conversion; InvalidInputError if another thing."""
        existing = self._target.existing(self._checkpoint.identity().identity, force=force)
        if existing is None:
            return False
        if (existing.expert_bank, existing.tensors) != (self._plan.bank, self._plan.tensors):
            raise InvalidInputError(
                f"{self._target.directory} exists and was converted from this checkpoint into "
                f"other weight formats (experts: {existing.expert_bank.format}). Use --force to "
                f"replace it, or choose another target."
            )
        self._progress(
            ConvertProgress(
                done_bytes=existing.region_bytes,
                total_bytes=existing.region_bytes,
                note=f"{self._target.directory} already holds this conversion; nothing to do.",
            )
        )
        return True

    def run(self, threads_count: int) -> None:
        """Convert, within the lock of the target."""
        self._check_duplicate_head()
        done = self._resume()
        self._say_plain()
        self._say_ignored()
        self._errors = ErrorLedger(done.errors)
        self._target.check_space(
            self._plan.region_bytes
            - finished_bytes(len(done.checksums), self._plan.shards)
            + side_file_bytes(self._checkpoint.directory)
            + _SLACK_BYTES
        )
        journal = Journal(self._target.temporary, self._task(), done)
        count = len(done.checksums)

        def on_block(checksum: str) -> None:
            nonlocal count
            count += 1
            journal.finished(checksum, self._errors.take(finished_bytes(count, self._plan.shards)))

        writer = RegionWriter(self._target.temporary, self._plan, done.checksums, on_block)
        try:
            self._write_region(writer, threads_count)
        finally:
            writer.close()
            journal.close()
        self._checkpoint.check_unchanged()
        self._target.publish(self._index(writer))

    def _task(self) -> Task:
        layout = json.dumps(
            [
                LAYOUT_VERSION,
                QUANTISER_VERSION if self._source.requantises else 0,
                [[name, asdict(entry)] for name, entry in self._plan.tensors.items()],
                asdict(self._plan.bank),
                [asdict(shard) for shard in self._plan.shards],
            ]
        )
        return Task(
            source=self._checkpoint.identity().identity,
            plan=hashlib.sha256(layout.encode()).hexdigest(),
        )

    def _resume(self) -> Progress:
        found = read_progress(self._target.temporary, self._task(), self._plan.shards)
        if found.dropped is not None:
            self._say(0, f"an unfinished conversion is dropped: {found.dropped}; starting over.")
        if found.checksums:
            done_bytes = finished_bytes(len(found.checksums), self._plan.shards)
            self._say(done_bytes, f"resuming an unfinished conversion at {done_bytes} bytes.")
        self._target.drop_leftovers(keep_shards=bool(found.checksums))
        return found

    def _say(self, done_bytes: int, note: str = "") -> None:
        self._progress(
            ConvertProgress(done_bytes=done_bytes, total_bytes=self._plan.region_bytes, note=note)
        )

    def _say_plain(self) -> None:
        said = self._checkpoint.gguf_values is None and self._scheme.name != "none"
        if said and self._source.scheme_name == "none":
            self._say(
                0,
                f"the checkpoint calls itself {self._scheme.name}, but none of its matrices is "
                f"quantised: they are converted as the plain ones that they are.",
            )

    def _say_ignored(self) -> None:
        ignored = self._source.ignored
        if ignored:
            more = len(ignored) - _SHOWN_COUNT
            self._say(
                0,
                f"{len(ignored)} tensors that nothing computes with are left out: "
                f"{', '.join(ignored[:_SHOWN_COUNT])}{f' and {more} more' if more > 0 else ''}.",
            )

    def _check_duplicate_head(self) -> None:
        duplicate = self._source.duplicate_head
        if duplicate is not None and not same_values(*duplicate):
            raise ModelDataError(
                f"config.json ties the output projection to the embedding, but "
                f"{duplicate[0].name} and {duplicate[1].name} differ in the checkpoint. Correct "
                f"tie_word_embeddings."
            )

    def _write_region(self, writer: RegionWriter, threads_count: int) -> None:
        pending = (
            piece
            for piece in region_pieces(self._source, self._plan)
            if piece.offset_bytes + piece.length_bytes > writer.offset_bytes
        )
        self._say(writer.offset_bytes)
        last: Piece | None = None
        for piece, made in _made_ahead(pending, threads_count):
            if piece.moe_layer_index is not None or piece.measured is not None:
                if last is not None and _layer_key(piece) != _layer_key(last):
                    self._say_error(writer.offset_bytes, last)
                last = piece
                end_bytes = piece.offset_bytes + piece.length_bytes
                self._errors.add(end_bytes, piece.moe_layer_index, made.errors)
            writer.write(piece.offset_bytes, made.data)
            self._say(writer.offset_bytes)
        if last is not None:
            self._say_error(writer.offset_bytes, last)
        writer.finish()
        self._say(writer.offset_bytes)

    def _say_error(self, done_bytes: int, last: Piece) -> None:
        """Tell what quantisation cost a layer of whose pieces `last` was the last."""
        if last.moe_layer_index is None:
            dense = self._errors.dense(layer_of(last.measured or ""))
            if dense is not None:
                self._say(done_bytes, _dense_note(dense, self._plan.tensors))
            return
        error = self._layer_error(last.moe_layer_index)
        if error is not None:
            self._say(
                done_bytes,
                f"layer {error.layer_index}: experts in {self._plan.bank.format} differ by "
                f"{error.gate:.4f} (gate), {error.up:.4f} (up), {error.down:.4f} (down) of the "
                f"weights' RMS.",
            )

    def _layer_error(self, moe_layer_index: int) -> LayerError | None:
        layer_index = self._plan.bank.moe_layer_indices[moe_layer_index]
        return self._errors.layer(moe_layer_index, layer_index)

    def _quantisation(self) -> Quantisation:
        errors = (self._layer_error(layer) for layer in range(self._plan.bank.moe_layers_count))
        layers = (None, *range(self._source.config.layers_count))
        dense = (self._errors.dense(layer) for layer in layers)
        return Quantisation(
            scheme=self._source.scheme_name,
            experts_from=str(self._source.experts_from),
            layer_errors=tuple(error for error in errors if error is not None),
            dense_errors=tuple(error for error in dense if error is not None),
        )

    def _index(self, writer: RegionWriter) -> FtwIndex:
        config = self._source.config
        index = FtwIndex(
            format_version=FORMAT_VERSION,
            layout_version=LAYOUT_VERSION,
            identity="",
            architecture=config.architecture,
            model_type=config.family.value,
            tied_embeddings=config.tied_embeddings,
            region_bytes=self._plan.region_bytes,
            shards=tuple(
                ShardEntry(
                    file=shard.file,
                    offset_bytes=shard.offset_bytes,
                    length_bytes=shard.length_bytes,
                    block_checksums=checksums,
                )
                for shard, checksums in zip(
                    self._plan.shards, writer.shard_checksums(), strict=True
                )
            ),
            tensors=self._plan.tensors,
            expert_bank=self._plan.bank,
            router=self._source.router_semantics(),
            quantisation=self._quantisation(),
            sources=tuple(sorted(self._source.consumed)),
            source=self._checkpoint.identity(),
            side_files=copy_side_files(self._checkpoint.directory, self._target.temporary),
        )
        return replace(index, identity=content_identity(index))


def _layer_key(piece: Piece) -> tuple[int | None, int | None]:
    """What errors are told together of."""
    return piece.moe_layer_index, layer_of(piece.measured or "")


def _dense_note(error: DenseError, tensors: Mapping[str, TensorEntry]) -> str:
    what = "outside the layers" if error.layer_index is None else f"layer {error.layer_index}"
    return (
        f"{what}: linear layers in {tensors[error.worst_tensor].dtype} differ by "
        f"{error.error:.4f} of the weights' RMS, most of all {error.worst_tensor} "
        f"({error.worst_error:.4f})."
    )


def _made_ahead(pieces: Iterator[Piece], threads_count: int) -> Iterator[tuple[Piece, MadePiece]]:
    """Pieces in order with their bytes, made by threads a little ahead of the consumer."""
    pool = ThreadPoolExecutor(threads_count, thread_name_prefix="ftw-convert")
    waiting: deque[tuple[Piece, Future[MadePiece]]] = deque()
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(make_piece, piece)))
            if len(waiting) > 2 * threads_count:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _raise_disk_error(error: OSError, target: Target) -> NoReturn:
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise ResourceError(
            f"writing {target.temporary} failed: {what}. What is written so far is kept: make "
            f"room (or lower the shard size if files are limited) and run the conversion again "
            f"to go on.",
            reason=Reason.DISK_SPACE,
        ) from error
    raise ResourceError(
        f"conversion into {target.directory} failed at {error.filename or target.temporary}: "
        f"{what}. Run it again to go on.",
        reason=Reason.IO_FAILED,
    ) from error
