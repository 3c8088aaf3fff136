"""A small working tokenizer: byte-level BPE with ChatML-like special tokens and a chat template.

Ids 0..255 are the bytes, then some merges, and the special tokens are the last ids used. Any text
encodes and decodes to itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MIN_VOCAB = 256 + len(SPECIAL_TOKENS) + len(MARKER_TOKENS)
_MERGES = ("t h", "th e", "i n", "e r", "a n", "o u", "r e", "Ġ th", "Ġ a", "in g", "Ġth e", "o n")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable stand-in of every byte, by byte value, as byte-level BPE writes them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def special_token_ids(vocab: int) -> dict[str, int]:
    """Special and marker tokens with their ids, for a model of `vocab` ids."""
    first = 256 + len(_merges(vocab))
    return {token: first + i for i, token in enumerate(SPECIAL_TOKENS + MARKER_TOKENS)}


def tiny_tokenizer(vocab: int = MIN_VOCAB) -> Tokenizer:
    """The tokenizer itself; with MIN_VOCAB nothing is merged: one id a byte."""
    return Tokenizer.from_str(json.dumps(_tokenizer_document(vocab)))


def write_tiny_text(directory: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """All files of a model's text side, without merges; <|im_end|> and <|endoftext|> end."""
    write_tiny_tokenizer(directory, MIN_VOCAB, template=template)
    specials = special_token_ids(MIN_VOCAB)
    end = [specials["<|im_end|>"], specials["<|endoftext|>"]]
    (directory / "config.json").write_text(json.dumps({"eos_token_id": end[0]}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return directory


def write_tiny_tokenizer(
    directory: Path, vocab: int, *, template: str | None = CHAT_TEMPLATE
) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja; `vocab` >= MIN_VOCAB."""
    document = _tokenizer_document(vocab)
    (directory / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    if template is not None:
        settings["chat_template"] = template
        (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _tokenizer_document(vocab: int) -> dict[str, Any]:
    if vocab < MIN_VOCAB:
        raise ValueError(f"the tokenizer needs {MIN_VOCAB} ids, the model has {vocab}")
    merges = _merges(vocab)
    tokens = byte_characters() + [merge.replace(" ", "") for merge in merges]
    specials = special_token_ids(vocab)
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token, token_id in specials.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _merges(vocab: int) -> tuple[str, ...]:
    return _MERGES[: max(vocab - MIN_VOCAB, 0)]
