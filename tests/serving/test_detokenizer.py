"""Pieces add up to the text, whatever the chunking; stop strings cut at the first hit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetokend.serving.detokenizer import IncrementalDetokenizer, StopMatcher
from tests.support.tiny_tokenizer import MIN_VOCAB, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True))


def chunked(ids: list[int], sizes: list[int]) -> list[list[int]]:
    out, at = [], 0
    while at < len(ids):
        size = sizes[len(out) % len(sizes)]
        out.append(ids[at : at + size])
        at += size
    return out


@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_pieces_add_up_to_the_text(text: str, sizes: list[int]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(decode)
    pieces = [detokenizer.push(chunk) for chunk in chunked(ids, sizes)]
    assert "".join([*pieces, detokenizer.finish()]) == decode(ids)


@given(ids=st.lists(st.integers(0, MIN_VOCAB - 1), max_size=60), size=st.integers(1, 9))
def test_chunking_of_any_bytes_does_not_matter(ids: list[int], size: int) -> None:
    """Also for ids that are not valid UTF-8: every chunking gives the same text."""
    one = IncrementalDetokenizer(decode)
    whole = one.push(ids) + one.finish()
    other = IncrementalDetokenizer(decode)
    assert "".join([*(other.push(c) for c in chunked(ids, [size])), other.finish()]) == whole


def test_half_a_character_is_held_back() -> None:
    ids = TOKENIZER.encode("é!", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(decode)
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.push(ids[1:2]) == "é"
    assert detokenizer.push(ids[2:]) == "!"
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_told_at_the_end() -> None:
    ids = TOKENIZER.encode("é", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(decode)
    detokenizer.push(ids[:1])
    assert detokenizer.finish() == "\ufffd"


def naive_cut(text: str, stops: list[str]) -> tuple[str, bool]:
    hits = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(hits)], True) if hits else (text, False)


@given(
    text=st.text(alphabet="ab|", max_size=40),
    stops=st.lists(st.text(alphabet="ab|", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 5),
)
def test_stop_strings_cut_where_a_search_of_the_prefix_would(
    text: str, stops: list[str], size: int
) -> None:
    """Against the naive oracle that looks again after every piece."""
    matcher = StopMatcher(stops)
    out, seen, expected = "", "", None
    for at in range(0, len(text), size):
        out += matcher.push(text[at : at + size])
        seen += text[at : at + size]
        cut, hit = naive_cut(seen, stops)
        if hit:
            expected = cut
            break
        assert seen.startswith(out)
    if expected is None:
        assert matcher.matched is None
        assert out + matcher.finish() == text
    else:
        assert matcher.matched in stops
        assert out == expected


def test_what_comes_after_a_stop_is_dropped() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one E") == "one "
    assert matcher.push("ND two") == ""
    assert matcher.matched == "END"
    assert matcher.push("three") == ""
