"""From the bytes of freetoken_weight.json to a checked `FtwIndex`.

Everything that readers rely on is checked here, once: sizes, alignment, order, overlap, names, and
that the identity is that of the contents.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Final

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.contents import (
    FORMAT_NAME,
    FORMAT_VERSION,
    INDEX_FILE,
    LAYOUT_VERSION,
    DenseError,
    FtwIndex,
    LayerError,
    Quantisation,
    RouterSemantics,
    ShardEntry,
    SideFile,
    SourceIdentity,
    content_identity,
)
from freetokend.ftw.formats import PAGE_BYTES, WeightFormat, parse_format, record_layout
from freetokend.ftw.layout import (
    EXPERT_RECORDS,
    EXPERTS_TENSOR,
    ROW_MAJOR,
    ROWS16,
    ExpertBank,
    TensorEntry,
    bank_tensor,
    blocks_count,
    shard_name,
    tensor_bytes,
)
from freetokend.ftw.strict_json import JsonObject, parse_json, read_file

MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
MAX_REGION_BYTES: Final = 1 << 50
MAX_SHARDS_COUNT: Final = 99_999
MAX_TENSORS_COUNT: Final = 1_000_000
MAX_SOURCES_COUNT: Final = 3_000_000
MAX_LAYERS_COUNT: Final = 65_536
MAX_EXPERTS_COUNT: Final = 1 << 20
MAX_SIZE: Final = 1 << 31

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_FILE: Final = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,254}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_XXH3: Final = re.compile(r"[0-9a-f]{16}")
_LAYOUTS: Final = {ROWS16: (), ROW_MAJOR: ("bf16", "f32", "i32"), EXPERT_RECORDS: ("u8",)}
_ACTIVATIONS: Final = re.compile("silu|gelu|gelu_tanh|swiglu_oai")
_MAX_ACTIVATION_NUMBER: Final = 1e6
_MAX_ERROR: Final = 1e9
_SCORINGS: Final = re.compile("softmax|sqrtsoftplus")
_SELECTIONS: Final = re.compile("top_k|biased_top_k")


def parse_index(directory: Path) -> FtwIndex:
    """Read freetoken_weight.json of `directory`; ModelDataError says what is wrong with it."""
    path = directory / INDEX_FILE
    data = read_file(path, limit_bytes=MAX_INDEX_BYTES, purpose="the index of an FTW directory")
    return index_from_json(data, str(path))


def index_from_json(data: bytes, where: str) -> FtwIndex:
    """The checked index in `data`; `where` names its file in errors."""
    root = JsonObject(parse_json(data, where), where)
    _check_version(root)
    index = FtwIndex(
        format_version=FORMAT_VERSION,
        layout_version=LAYOUT_VERSION,
        identity=root.text("identity", _SHA256),
        architecture=root.text("architecture", _NAME),
        model_type=root.text("model_type", _NAME),
        tied_embeddings=root.flag("tied_embeddings"),
        region_bytes=root.integer("region_bytes", PAGE_BYTES, MAX_REGION_BYTES),
        shards=_shards(root),
        tensors=_tensors(root),
        expert_bank=_bank(root.member("expert_bank")),
        router=_router(root.member("router")),
        quantisation=_quantisation(root.member("quantisation")),
        sources=_sources(root),
        source=_source(root.member("source")),
        side_files=_side_files(root),
    )
    root.finish()
    _check_shards_cover(index, where)
    _check_tensors_fit(index, where)
    _check_bank(index, where)
    if content_identity(index) != index.identity:
        raise ModelDataError(
            f"{where}: the identity is not that of the contents; the file was changed after the "
            f"conversion. Copy the directory again or convert again."
        )
    return index


def _check_version(root: JsonObject) -> None:
    if root.get("format") != FORMAT_NAME:
        root.fail("format", f"is not {FORMAT_NAME!r}; this is not an FTW index")
    for key, known in (("format_version", FORMAT_VERSION), ("layout_version", LAYOUT_VERSION)):
        found = root.integer(key, 0, MAX_SIZE)
        if found != known:
            raise ModelDataError(
                f"{root.where}: {key} is {found} and this program reads {known}. Convert the "
                f"original checkpoint again with this version of freetokenctl.",
                reason=Reason.MODEL_UNSUPPORTED,
            )


def _shards(root: JsonObject) -> tuple[ShardEntry, ...]:
    shards = []
    for position, value in enumerate(root.items("shards", MAX_SHARDS_COUNT)):
        shard = JsonObject(value, f"{root.where}: shard {position}")
        # Only one name is possible, so no path can leave the directory.
        file = shard.text("file", re.compile(re.escape(shard_name(position))))
        shard.where = f"{root.where}: shard {file}"
        length_bytes = shard.integer("length_bytes", PAGE_BYTES, MAX_REGION_BYTES)
        if length_bytes % PAGE_BYTES:
            shard.fail("length_bytes", f"is {length_bytes}, not a multiple of {PAGE_BYTES}")
        count = blocks_count(length_bytes)
        checksums = shard.items("block_checksums", count)
        if len(checksums) != count:
            shard.fail("block_checksums", f"has {len(checksums)} entries for {count} blocks")
        shards.append(
            ShardEntry(
                file=file,
                offset_bytes=shard.integer("offset_bytes", 0, MAX_REGION_BYTES),
                length_bytes=length_bytes,
                block_checksums=tuple(
                    shard.as_text("block_checksums", checksum, _XXH3) for checksum in checksums
                ),
            )
        )
        shard.finish()
    return tuple(shards)


def _check_shards_cover(index: FtwIndex, where: str) -> None:
    end_bytes = 0
    for shard in index.shards:
        if shard.offset_bytes != end_bytes:
            raise ModelDataError(
                f"{where}: shard {shard.file}: offset_bytes is {shard.offset_bytes}, but the "
                f"shards before it end at {end_bytes}."
            )
        end_bytes += shard.length_bytes
    if end_bytes != index.region_bytes:
        raise ModelDataError(
            f"{where}: the shards hold {end_bytes} bytes, region_bytes says {index.region_bytes}."
        )


def _tensors(root: JsonObject) -> dict[str, TensorEntry]:
    table = root.member("tensors").members()
    if len(table) > MAX_TENSORS_COUNT:
        root.fail("tensors", f"has {len(table)} entries, more than {MAX_TENSORS_COUNT}")
    result = {}
    for name, value in table.items():
        root.as_text("the name of a tensor", name, _NAME)
        entry = JsonObject(value, f"{root.where}: tensor {name}")
        layout = entry.text("layout", re.compile("|".join(_LAYOUTS)))
        dtype = entry.text("dtype", _NAME)
        known = _format(dtype) is not None if layout == ROWS16 else dtype in _LAYOUTS[layout]
        if not known:
            entry.fail("dtype", f"is {dtype}, which the layout {layout} does not have")
        shape = tuple(
            entry.as_integer("shape", size, 1, MAX_SIZE) for size in entry.items("shape", 4)
        )
        if len(shape) != {ROWS16: 2, EXPERT_RECORDS: 3}.get(layout, max(len(shape), 1)):
            entry.fail("shape", f"has {len(shape)} sizes, wrong for the layout {layout}")
        offset_bytes = entry.integer("offset_bytes", 0, MAX_REGION_BYTES)
        if offset_bytes % PAGE_BYTES:
            entry.fail("offset_bytes", f"is {offset_bytes}, not a multiple of {PAGE_BYTES}")
        length_bytes = entry.integer("length_bytes", 1, MAX_REGION_BYTES)
        try:
            needed_bytes = tensor_bytes(dtype, shape, layout)
        except ValueError as error:
            entry.fail("shape", f"is {list(shape)}: {error}")
        if length_bytes != needed_bytes:
            entry.fail(
                "length_bytes", f"is {length_bytes}; {dtype} {list(shape)} takes {needed_bytes}"
            )
        entry.finish()
        result[name] = TensorEntry(
            dtype=dtype,
            shape=shape,
            layout=layout,
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
        )
    return result


def _format(name: str) -> WeightFormat | None:
    """The format whose canonical name this is."""
    try:
        found = parse_format(name)
    except ValueError:
        return None
    return found if str(found) == name else None


def _check_tensors_fit(index: FtwIndex, where: str) -> None:
    previous, end_bytes = "", 0
    ordered = sorted(index.tensors.items(), key=lambda item: item[1].offset_bytes)
    for name, entry in ordered:
        if entry.offset_bytes < end_bytes:
            raise ModelDataError(
                f"{where}: tensor {name} at {entry.offset_bytes} overlaps {previous}, which ends "
                f"at {end_bytes}."
            )
        previous, end_bytes = name, entry.end_bytes
    if end_bytes > index.region_bytes:
        raise ModelDataError(
            f"{where}: tensor {previous} ends at {end_bytes}, beyond the region of "
            f"{index.region_bytes} bytes."
        )


def _bank(bank: JsonObject) -> ExpertBank:
    layers = [
        bank.as_integer("moe_layer_indices", value, 0, MAX_LAYERS_COUNT)
        for value in bank.items("moe_layer_indices", MAX_LAYERS_COUNT)
    ]
    result = ExpertBank(
        format=bank.text("format", _NAME),
        offset_bytes=bank.integer("offset_bytes", 0, MAX_REGION_BYTES),
        record_bytes=bank.integer("record_bytes", PAGE_BYTES, MAX_REGION_BYTES),
        moe_layers_count=bank.integer("moe_layers_count", 1, MAX_LAYERS_COUNT),
        experts_per_layer_count=bank.integer("experts_per_layer_count", 1, MAX_EXPERTS_COUNT),
        hidden_size=bank.integer("hidden_size", 1, MAX_SIZE),
        intermediate_size=bank.integer("intermediate_size", 1, MAX_SIZE),
        moe_layer_indices=tuple(layers),
        activation=bank.text("activation", _ACTIVATIONS),
        activation_limit=bank.number("activation_limit", 0.0, _MAX_ACTIVATION_NUMBER),
        activation_alpha=bank.number("activation_alpha", 0.0, _MAX_ACTIVATION_NUMBER),
        has_bias=bank.flag("has_bias"),
    )
    bank.finish()
    if len(layers) != result.moe_layers_count:
        bank.fail("moe_layer_indices", f"has {len(layers)} of {result.moe_layers_count} entries")
    if any(left >= right for left, right in itertools.pairwise(layers)):
        bank.fail("moe_layer_indices", "does not rise from entry to entry")
    return result


def _check_bank(index: FtwIndex, where: str) -> None:
    bank = index.expert_bank
    weight_format = _format(bank.format)
    if weight_format is None:
        raise ModelDataError(
            f"{where}: expert_bank: the format {bank.format} is unknown to this program.",
            reason=Reason.MODEL_UNSUPPORTED,
        )
    try:
        needed_bytes = record_layout(
            weight_format, bank.hidden_size, bank.intermediate_size, has_bias=bank.has_bias
        ).record_bytes
    except ValueError as error:
        raise ModelDataError(f"{where}: expert_bank: {error}.") from error
    if bank.record_bytes != needed_bytes:
        raise ModelDataError(
            f"{where}: expert_bank: record_bytes is {bank.record_bytes}; {bank.format} experts of "
            f"{bank.hidden_size} x {bank.intermediate_size} take {needed_bytes}."
        )
    if index.tensors.get(EXPERTS_TENSOR) != bank_tensor(bank):
        raise ModelDataError(
            f"{where}: the tensor {EXPERTS_TENSOR!r} does not describe the same place as "
            f"expert_bank."
        )
    for name, entry in index.tensors.items():
        if entry.layout == EXPERT_RECORDS and name != EXPERTS_TENSOR:
            raise ModelDataError(f"{where}: tensor {name} claims to be a second expert bank.")
    if index.router.top_k_count > bank.experts_per_layer_count:
        raise ModelDataError(
            f"{where}: router: top_k_count is {index.router.top_k_count} of "
            f"{bank.experts_per_layer_count} experts."
        )


def _router(router: JsonObject) -> RouterSemantics:
    result = RouterSemantics(
        scoring=router.text("scoring", _SCORINGS),
        selection=router.text("selection", _SELECTIONS),
        top_k_count=router.integer("top_k_count", 1, MAX_EXPERTS_COUNT),
        normalise=router.flag("normalise"),
        weight_scale=router.number("weight_scale", 0.0, 1e6),
    )
    router.finish()
    return result


def _quantisation(member: JsonObject) -> Quantisation:
    layers = []
    for value in member.items("layer_errors", MAX_LAYERS_COUNT):
        entry = JsonObject(value, f"{member.where}: layer_errors")
        layers.append(
            LayerError(
                layer_index=entry.integer("layer_index", 0, MAX_LAYERS_COUNT),
                gate=entry.number("gate", 0.0, _MAX_ERROR),
                up=entry.number("up", 0.0, _MAX_ERROR),
                down=entry.number("down", 0.0, _MAX_ERROR),
            )
        )
        entry.finish()
    result = Quantisation(
        scheme=member.text("scheme", _NAME),
        experts_from=member.text("experts_from", _NAME),
        layer_errors=tuple(layers),
        dense_errors=_dense_errors(member) if member.has("dense_errors") else (),
    )
    member.finish()
    return result


def _dense_errors(member: JsonObject) -> tuple[DenseError, ...]:
    result = []
    for value in member.items("dense_errors", MAX_LAYERS_COUNT):
        entry = JsonObject(value, f"{member.where}: dense_errors")
        layer = entry.get("layer_index")
        if layer is not None:
            layer = entry.as_integer("layer_index", layer, 0, MAX_LAYERS_COUNT)
        result.append(
            DenseError(
                layer_index=layer,
                error=entry.number("error", 0.0, _MAX_ERROR),
                worst_tensor=entry.text("worst_tensor", _NAME),
                worst_error=entry.number("worst_error", 0.0, _MAX_ERROR),
            )
        )
        entry.finish()
    if not result:
        member.fail("dense_errors", "is empty; an index without any leaves it out")
    return tuple(result)


def _sources(root: JsonObject) -> tuple[str, ...]:
    return tuple(
        root.as_text("sources", name, _NAME) for name in root.items("sources", MAX_SOURCES_COUNT)
    )


def _source(source: JsonObject) -> SourceIdentity:
    files = []
    for value in source.items("files", MAX_SHARDS_COUNT):
        entry = JsonObject(value, f"{source.where}: files")
        files.append((entry.text("file", _FILE), entry.integer("length_bytes", 0, 1 << 62)))
        entry.finish()
    result = SourceIdentity(identity=source.text("identity", _SHA256), files=tuple(files))
    source.finish()
    return result


def _side_files(root: JsonObject) -> tuple[SideFile, ...]:
    result = []
    for value in root.items("side_files", 1000):
        entry = JsonObject(value, f"{root.where}: side_files")
        result.append(
            SideFile(
                file=entry.text("file", _FILE),
                length_bytes=entry.integer("length_bytes", 0, MAX_REGION_BYTES),
                checksum=entry.text("checksum", _XXH3),
            )
        )
        entry.finish()
    return tuple(result)
