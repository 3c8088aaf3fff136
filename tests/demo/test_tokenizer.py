"""The tokenizer files: golden ids, an independent oracle, round trips, the chat template."""

from __future__ import annotations

import json
import re
import unicodedata
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from tests.support.demo_model import demo_checkpoint

pytestmark = pytest.mark.slow

REFERENCE = (
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces\n\nand\ttabs \n",
    "In 1984 there were 12345.67 of them, weren't there? I'll say!",
    "def add(a, b):\n    return a + b\n",
    "naïve café — “quotes” … ½",
    "Привет, мир! 你好世界",
    "🙂👩‍👩‍👧 emoji",
)


@cache
def files() -> tuple[Tokenizer, dict[str, Any]]:
    path = demo_checkpoint("demo") / "tokenizer.json"
    return Tokenizer.from_file(str(path)), json.loads(path.read_text())


@cache
def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def oracle_encode(text: str) -> list[int]:
    """Byte-level BPE written from its definition: split, then merge the best-ranked pair."""
    model = files()[1]["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    # GPT-2's split, after every numeral has been set apart; [^\W\d_] stands for a letter.
    split = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?[^\s\w]+| ?_+|\s+(?!\S)|\s+")
    ids = []
    for numeral, run in groupby(text, key=lambda c: unicodedata.category(c).startswith("N")):
        part = "".join(run)
        words = list(part) if numeral else split.findall(part)
        for word in words:
            parts = [byte_letters()[byte] for byte in word.encode()]
            while len(parts) > 1:
                pairs = list(pairwise(parts))
                best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
                if pairs[best] not in ranks:
                    break
                parts[best : best + 2] = ["".join(pairs[best])]
            ids += [model["vocab"][part] for part in parts]
    return ids


@pytest.mark.parametrize("text", REFERENCE)
def test_reference_strings(text: str) -> None:
    tokenizer, _ = files()
    ids = tokenizer.encode(text, add_special_tokens=True).ids
    assert ids == oracle_encode(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [19556, 28, 905, 17]),
        ("12345 apples", [33, 34, 35, 36, 37, 13855]),
        ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ],
)
def test_golden_ids(text: str, ids: list[int]) -> None:
    assert files()[0].encode(text).ids == ids


# The source vocabulary lacks these bytes: characters that need them vanish in every program.
ABSENT_BYTES = bytes([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2])
PRESENT = st.characters(
    exclude_characters="".join(chr(byte) for byte in ABSENT_BYTES if byte < 0x80),
    codec="utf-8",
    max_codepoint=0x3FFFF,  # the next ones begin with 0xF1
)


def test_absent_bytes() -> None:
    used_by_utf8 = [*range(0xC0), *range(0xC2, 0xF5)]
    vocabulary = files()[1]["model"]["vocab"]
    absent = [byte for byte in used_by_utf8 if byte_letters()[byte] not in vocabulary]
    assert bytes(absent) == ABSENT_BYTES


@given(st.text(PRESENT))
@settings(deadline=None, max_examples=200)
def test_any_other_text_comes_back(text: str) -> None:
    tokenizer, _ = files()
    ids = tokenizer.encode(text).ids
    if not any(i < 17 for i in ids):  # markers spelt out in the text are not text
        assert tokenizer.decode(ids) == text


def test_markers_are_single_special_tokens() -> None:
    tokenizer, document = files()
    markers = {token["content"]: token["id"] for token in document["added_tokens"]}
    assert len(markers) == 17
    assert markers["<|im_start|>"] == 1
    assert markers["<|im_end|>"] == 2
    for content, token_id in markers.items():
        assert tokenizer.encode(content).ids == [token_id]


def test_transformers_reads_the_directory(demo_dir: Path) -> None:
    """The files are what a Hugging Face program expects, the ChatML template included."""
    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer(prompt)["input_ids"] == files()[0].encode(prompt).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    config = AutoConfig.from_pretrained(demo_dir)
    assert (config.model_type, config.eos_token_id) == ("mixtral", 2)
