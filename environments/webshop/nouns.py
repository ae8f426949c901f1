"""Nouns of product titles, which the reward compares: from a file, from spaCy, or by an approximation.

    title_nouns.json[.gz] in the data folder    {title: [nouns in order, with repeats]}; exact
    spaCy with an English model                 what upstream does (en_core_web_lg there); kept in the cache folder
    neither                                     every word of letters that is no function word: says so once

The approximation keeps adjectives and verbs, so two titles share more than their nouns.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

SPACY_MODELS = ("en_core_web_lg", "en_core_web_md", "en_core_web_sm")  # upstream's own first
NOUN_TAGS = ("NOUN", "PROPN")
WORD = re.compile(r"[^\W_]+")
_FUNCTION_WORDS = (
    "a about above after all an and any are as at be before below both but by can each for from has have he her his if "
    "in inside into is it its less like more most no non not of off on only or other our out over per she so than that "
    "the their them then there these they this to too under up use very via was we with without you your "
    "anti big black blue easy extra free full gray green grey high hot large light long natural new old organic pink "
    "pure purple red short slim small soft super thick white wide yellow"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


def approximate_nouns(title: str) -> list[str]:
    """Words with a letter in them, in lower case, but for function words and the commonest adjectives."""
    words = WORD.findall(title.lower())
    return [word for word in words if not word.isdecimal() and word not in FUNCTION_WORDS]


class Nouns:
    """title -> its nouns, in lower case, with repeats."""

    def __init__(
        self, known: dict[str, list[str]], ask: Callable[[str], list[str]] | None = None, cache: Path | None = None
    ) -> None:
        self._known, self._ask, self._cache = known, ask, cache
        self._warned = False

    @classmethod
    def find(cls, folder: Path, cache_dir: str | Path | None) -> Nouns:
        """The best source there is for a data folder."""
        for path in (folder / "title_nouns.json", folder / "title_nouns.json.gz"):
            if path.is_file():
                with (
                    gzip.open(path, "rt", encoding="utf-8")
                    if path.suffix == ".gz"
                    else open(path, encoding="utf-8") as f
                ):
                    return cls(json.load(f))
        found = [name for name in SPACY_MODELS if importlib.util.find_spec("spacy") and importlib.util.find_spec(name)]
        if not found:
            return cls({})
        cache = Path(cache_dir) / f"nouns-{found[0]}.jsonl" if cache_dir else None
        known = {}
        if cache is not None and cache.is_file():
            known = dict(json.loads(line) for line in cache.read_text(encoding="utf-8").splitlines())
        return cls(known, _spacy_tagger(found[0]), cache)

    def __call__(self, title: str) -> list[str]:
        if title in self._known:
            return self._known[title]
        if self._ask is None:
            if not self._warned:
                warnings.warn(
                    "webshop: nouns of titles are approximated, so rewards may differ from upstream's; put "
                    "title_nouns.json into the data folder or install spaCy with en_core_web_lg",
                    stacklevel=2,
                )
                self._warned = True
            return self._known.setdefault(title, approximate_nouns(title))
        nouns = self._known.setdefault(title, self._ask(title))
        if self._cache is not None:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            with open(self._cache, "a", encoding="utf-8") as file:  # one short write: other processes append too
                file.write(json.dumps([title, nouns]) + "\n")
        return nouns


def _spacy_tagger(model: str) -> Callable[[str], list[str]]:
    """Loads the model at the first title, for it takes seconds and half a gigabyte."""
    loaded: list = []

    def nouns(title: str) -> list[str]:
        if not loaded:
            import spacy

            loaded.append(spacy.load(model))
        return [token.text.lower() for token in loaded[0](title) if token.pos_ in NOUN_TAGS]

    return nouns
