"""The tokenizer files of the checkpoint, as JSON documents, from the GGUF vocabulary."""

from __future__ import annotations

from typing import Any

from freetokend.demo.gguf_model import Vocabulary

Document = dict[str, Any]


def tokenizer_document(vocabulary: Vocabulary) -> Document:
    """tokenizer.json: byte-level BPE in which every digit is a token of its own."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(vocabulary, i) for i in vocabulary.control_ids],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                _byte_level(add_prefix_space=False),
            ],
        },
        "post_processor": None,
        "decoder": _byte_level(add_prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
            "merges": [merge.split(" ") for merge in vocabulary.merges],
        },
    }


def tokenizer_config_document(vocabulary: Vocabulary, context_tokens: int) -> Document:
    """tokenizer_config.json, with the source model's ChatML template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "eos_token": vocabulary.tokens[vocabulary.eos_id],
        "pad_token": vocabulary.tokens[vocabulary.padding_id],
        "unk_token": vocabulary.tokens[vocabulary.unknown_id],
        # The template writes the opening marker itself; a second one would spoil the prompt.
        "add_bos_token": False,
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": vocabulary.chat_template,
    }


def generation_document(vocabulary: Vocabulary) -> Document:
    """generation_config.json."""
    return {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.padding_id,
    }


def _byte_level(add_prefix_space: bool) -> Document:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": True,
    }


def _added_token(vocabulary: Vocabulary, token_id: int) -> Document:
    return {
        "id": token_id,
        "content": vocabulary.tokens[token_id],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
