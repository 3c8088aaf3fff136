"""What an FTW index says: its values, its JSON form, its identity, and what lies where.

The form of the file is described in docs/ftw.md; `freetokend.ftw.index` reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from freetokend.ftw.layout import ExpertBank, TensorEntry

INDEX_FILE: Final = "freetoken_weight.json"
FORMAT_NAME: Final = "freetoken_weight"
FORMAT_VERSION: Final = 3
# Version of the packed forms (rows16, expert records): a pool filled in another one is of no use.
# A format that is added does not change it: a reader that lacks the format refuses its name.
LAYOUT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One file of the region; `block_checksums` are xxh3_64 in hex, one per 64 MiB."""

    file: str
    offset_bytes: int
    length_bytes: int
    block_checksums: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSemantics:
    """How experts are chosen: score all (fp32), take the top k, maybe renormalise, scale."""

    scoring: str
    selection: str
    top_k_count: int
    normalise: bool
    weight_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdentity:
    """What the directory was made from: `identity` (hex) covers names, sizes, headers, times."""

    identity: str
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFile:
    """A file copied in beside the weights; checksum: xxh3_64 in hex."""

    file: str
    length_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """What quantisation cost one MoE layer: RMS of the error / RMS of the weights, per matrix."""

    layer_index: int
    gate: float
    up: float
    down: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseError:
    """What quantisation cost the linear layers of one layer that are no routed experts.

    layer_index: None for what is outside the layers (the output projection); error: RMS of the
    errors / RMS of the weights, over all of them; worst_tensor: the one with the largest ratio.
    """

    layer_index: int | None
    error: float
    worst_tensor: str
    worst_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """Where the formats come from.

    scheme: how the checkpoint's matrices were quantised ("none" when they were plain, whatever it
    says of itself); experts_from: weight format that the experts had there; layer_errors: of every
    MoE layer when the converter quantised the experts itself, none when they were packed as they
    were; dense_errors: of every layer of which it quantised other linear layers.
    """

    scheme: str
    experts_from: str
    layer_errors: tuple[LayerError, ...] = ()
    dense_errors: tuple[DenseError, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FtwIndex:
    """Contents of freetoken_weight.json.

    `identity` is the hex SHA-256 over everything else in the index, so it stands for the bytes of
    the region (through the block checksums), their layout and their source. `tensors` holds the
    expert bank too, as "experts"; `sources` are the names of the consumed checkpoint tensors.
    """

    format_version: int
    layout_version: int
    identity: str
    architecture: str
    model_type: str
    tied_embeddings: bool
    region_bytes: int
    shards: tuple[ShardEntry, ...]
    tensors: Mapping[str, TensorEntry]
    expert_bank: ExpertBank
    router: RouterSemantics
    quantisation: Quantisation
    sources: tuple[str, ...]
    source: SourceIdentity
    side_files: tuple[SideFile, ...]

    @property
    def identity_bytes(self) -> bytes:
        """The 32 bytes of `identity`."""
        return bytes.fromhex(self.identity)


def index_document(index: FtwIndex) -> dict[str, object]:
    """The JSON object of `index`."""
    bank = index.expert_bank
    return {
        "format": FORMAT_NAME,
        "format_version": index.format_version,
        "layout_version": index.layout_version,
        "identity": index.identity,
        "architecture": index.architecture,
        "model_type": index.model_type,
        "tied_embeddings": index.tied_embeddings,
        "region_bytes": index.region_bytes,
        "shards": [
            {
                "file": shard.file,
                "offset_bytes": shard.offset_bytes,
                "length_bytes": shard.length_bytes,
                "block_checksums": list(shard.block_checksums),
            }
            for shard in index.shards
        ],
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "layout": entry.layout,
                "offset_bytes": entry.offset_bytes,
                "length_bytes": entry.length_bytes,
            }
            for name, entry in index.tensors.items()
        },
        "expert_bank": {
            "format": bank.format,
            "offset_bytes": bank.offset_bytes,
            "record_bytes": bank.record_bytes,
            "moe_layers_count": bank.moe_layers_count,
            "experts_per_layer_count": bank.experts_per_layer_count,
            "hidden_size": bank.hidden_size,
            "intermediate_size": bank.intermediate_size,
            "moe_layer_indices": list(bank.moe_layer_indices),
            "activation": bank.activation,
            "activation_limit": bank.activation_limit,
            "activation_alpha": bank.activation_alpha,
            "has_bias": bank.has_bias,
        },
        "router": {
            "scoring": index.router.scoring,
            "selection": index.router.selection,
            "top_k_count": index.router.top_k_count,
            "normalise": index.router.normalise,
            "weight_scale": index.router.weight_scale,
        },
        "quantisation": _quantisation_document(index.quantisation),
        "sources": list(index.sources),
        "source": {
            "identity": index.source.identity,
            "files": [
                {"file": file, "length_bytes": length} for file, length in index.source.files
            ],
        },
        "side_files": [
            {"file": side.file, "length_bytes": side.length_bytes, "checksum": side.checksum}
            for side in index.side_files
        ],
    }


def _quantisation_document(quantisation: Quantisation) -> dict[str, object]:
    document: dict[str, object] = {
        "scheme": quantisation.scheme,
        "experts_from": quantisation.experts_from,
        "layer_errors": [asdict(layer) for layer in quantisation.layer_errors],
    }
    if quantisation.dense_errors:
        document["dense_errors"] = [asdict(layer) for layer in quantisation.dense_errors]
    return document


def content_identity(index: FtwIndex) -> str:
    """The identity `index` must carry: hex SHA-256 of its canonical JSON without `identity`."""
    document = index_document(index)
    del document["identity"]
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def index_json(index: FtwIndex) -> bytes:
    """The bytes of freetoken_weight.json; the same index always gives the same bytes."""
    text = json.dumps(index_document(index), indent=1, ensure_ascii=True)
    return text.encode("ascii") + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRange:
    """Experts first..last (inclusive) of one layer; both indices of the layer."""

    layer_index: int
    moe_layer_index: int
    first_expert: int
    last_expert: int


def tensors_in_range(index: FtwIndex, start_bytes: int, end_bytes: int) -> tuple[str, ...]:
    """Names of the tensors that overlap [start, end) of the region, in region order."""
    hits = [
        (entry.offset_bytes, name)
        for name, entry in index.tensors.items()
        if entry.offset_bytes < end_bytes and entry.end_bytes > start_bytes
    ]
    return tuple(name for _, name in sorted(hits))


def experts_in_range(index: FtwIndex, start_bytes: int, end_bytes: int) -> tuple[ExpertRange, ...]:
    """Experts whose records overlap [start, end) of the region, one entry per layer."""
    bank = index.expert_bank
    start = max(start_bytes, bank.offset_bytes) - bank.offset_bytes
    end = min(end_bytes, bank.offset_bytes + bank.length_bytes) - bank.offset_bytes
    if start >= end:
        return ()
    first_id, last_id = start // bank.record_bytes, (end - 1) // bank.record_bytes
    per_layer = bank.experts_per_layer_count
    return tuple(
        ExpertRange(
            layer_index=bank.moe_layer_indices[layer],
            moe_layer_index=layer,
            first_expert=max(first_id - layer * per_layer, 0),
            last_expert=min(last_id - layer * per_layer, per_layer - 1),
        )
        for layer in range(first_id // per_layer, last_id // per_layer + 1)
    )


def describe_range(index: FtwIndex, start_bytes: int, end_bytes: int) -> str:
    """What lies in [start, end) of the region, for people: tensors, layers and experts."""
    names = [name for name in tensors_in_range(index, start_bytes, end_bytes) if name != "experts"]
    parts = []
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        parts.append(f"{'tensor' if len(names) == 1 else 'tensors'} {', '.join(names[:3])}{more}")
    experts = experts_in_range(index, start_bytes, end_bytes)
    if experts:
        first, last = experts[0], experts[-1]
        if (first.layer_index, first.first_expert) == (last.layer_index, last.last_expert):
            parts.append(f"layer {first.layer_index} expert {first.first_expert}")
        else:
            parts.append(
                f"layer {first.layer_index} expert {first.first_expert} to layer "
                f"{last.layer_index} expert {last.last_expert}"
            )
    return "; ".join(parts) if parts else "padding only"
