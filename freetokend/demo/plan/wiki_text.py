"""Calibration and held-out text: Wikipedia articles and news from gensim's test data."""

from __future__ import annotations

import bz2
import html
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from freetokend.demo.errors import DemoError
from freetokend.demo.plan.llama import TokenIds

WINDOW_TOKENS = 256

_FOLDER = "gensim/test/test_data/"
_WIKI_MEMBER = _FOLDER + "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_NEWS_MEMBER = _FOLDER + "lee_background.cor"

_CALIBRATION_SHARE = 0.85  # of the articles, in file order; the rest is held out
_WINDOWS_PER_ARTICLE = 6  # few, for variety
_SHORTEST_PARAGRAPH_CHARS = 200  # shorter ones are mostly captions and lists
_FEWEST_PARAGRAPHS = 4
_NESTED_TEMPLATES = 4  # templates are removed from the inside out, one level per pass

_PAGE = re.compile(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_TEMPLATE_OR_TABLE = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*?\|\}", re.DOTALL)
_REFERENCE_OR_TAG = re.compile(
    r"<ref[^>]*/>|<ref.*?</ref>|<!--.*?-->|<[^>]+>",
    re.DOTALL,
)
_FILE_LINK = re.compile(
    r"\[\[(?:File|Image|Category):[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]",
)
_LINK = re.compile(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]")
_WEB_LINK = re.compile(r"\[https?:\S+ ?([^\]]*)\]")
_EMPHASIS = re.compile(r"'{2,}")


@dataclass(frozen=True)
class TextSets:
    """Token windows [windows, 256]: one set to calibrate on, two to measure on."""

    calibration: TokenIds
    held_out_wiki: TokenIds
    held_out_news: TokenIds


def read_text_sets(
    wheel: Path, tokenizer: Tokenizer, calibration_windows: int, held_out_windows: int
) -> TextSets:
    """Cut the sets from gensim's wheel. The same arguments always give the same windows."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            dump = bz2.decompress(archive.read(_WIKI_MEMBER)).decode("utf-8", "ignore")
            news = archive.read(_NEWS_MEMBER).decode("utf-8")
    except (zipfile.BadZipFile, KeyError, OSError, EOFError) as error:
        raise DemoError(
            f"cannot read the text in {wheel} ({error}); delete the file and try again."
        ) from error
    articles = plain_articles(dump)
    calibration_articles = int(len(articles) * _CALIBRATION_SHARE)
    return TextSets(
        calibration=_windows(tokenizer, articles[:calibration_articles], calibration_windows),
        held_out_wiki=_windows(tokenizer, articles[calibration_articles:], held_out_windows),
        held_out_news=pack_windows([tokenizer.encode(_joined_lines(news)).ids])[:held_out_windows],
    )


def plain_articles(dump: str) -> list[str]:
    """Title and prose paragraphs of every article in a MediaWiki dump that has enough of them."""
    articles = []
    for page in _PAGE.finditer(dump):
        title, source = page.group(1), html.unescape(html.unescape(page.group(2)))
        if source.lower().startswith("#redirect"):
            continue
        paragraphs = [line.strip() for line in _without_markup(source).split("\n")]
        prose = [
            paragraph
            for paragraph in paragraphs
            if len(paragraph) > _SHORTEST_PARAGRAPH_CHARS and paragraph[0] not in "*#|!{:;="
        ]
        if len(prose) >= _FEWEST_PARAGRAPHS:
            articles.append("\n\n".join([title, *prose]))
    return articles


def _without_markup(source: str) -> str:
    for _ in range(_NESTED_TEMPLATES):
        source = _TEMPLATE_OR_TABLE.sub("", source)
    source = _REFERENCE_OR_TAG.sub("", source)
    source = _FILE_LINK.sub("", source)
    source = _LINK.sub(r"\1", source)
    source = _WEB_LINK.sub(r"\1", source)
    return _EMPHASIS.sub("", source)


def _joined_lines(text: str) -> str:
    return text.replace("\n", "\n\n")


def _windows(tokenizer: Tokenizer, articles: Iterable[str], count: int) -> TokenIds:
    """The first windows of each article, until there are `count`."""
    windows: list[list[int]] = []
    for article in articles:
        if len(windows) >= count:
            break
        ids = tokenizer.encode(article).ids
        whole = min(len(ids) // WINDOW_TOKENS, _WINDOWS_PER_ARTICLE)
        windows += [ids[i * WINDOW_TOKENS : (i + 1) * WINDOW_TOKENS] for i in range(whole)]
    return np.array(windows[:count], dtype=np.int64).reshape(-1, WINDOW_TOKENS)


def pack_windows(sequences: Iterable[Sequence[int]]) -> TokenIds:
    """Join token sequences and cut the result into whole windows; a rest is dropped."""
    joined = [token for sequence in sequences for token in sequence]
    count = len(joined) // WINDOW_TOKENS
    used = np.array(joined[: count * WINDOW_TOKENS], dtype=np.int64)
    return used.reshape(count, WINDOW_TOKENS)
