"""The Porter stemmer as Lucene runs it: suffixes go in five steps, each only where enough of a word is left.

    measure(stem) = how often a consonant follows a vowel      tree 0, oats 1, troubles 2
    step 1   plurals, -ed, -ing, y -> i       caresses -> caress, hopping -> hop, happy -> happi
    step 2-4 -ational -> -ate, -icate -> -ic, -ment -> nothing ...   where the measure allows
    step 5   a last e, a double l

Source: Porter, "An algorithm for suffix stripping", 1980, with the two changes of its author's later programs, which
Lucene has too (-bli -> -ble, -logi -> -log), and words of at most two letters left alone.  Deliberately absent: other
languages, exceptions lists (they belong to Porter 2).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

VOWELS = frozenset("aeiou")

# Steps 2 and 3 replace the suffix where the rest has a measure above 0, step 4 removes it where it is above 1.
STEP2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "bli": "ble", "alli": "al",
    "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate", "alism": "al",
    "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble", "logi": "log",
}  # fmt: skip
STEP3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
STEP4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti",
    "ous", "ive", "ize",
)  # fmt: skip


def _ending(suffixes: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest suffix that a word ends in: the one that starts first. No other one is tried."""
    return re.compile(f"(?:{'|'.join(suffixes)})$")


_STEP2, _STEP3, _STEP4 = _ending(STEP2), _ending(STEP3), _ending(STEP4)


def _is_consonant(word: str, i: int) -> bool:
    """A letter other than a vowel; y counts as a consonant at the start and after a vowel."""
    if word[i] in VOWELS:
        return False
    return word[i] != "y" or i == 0 or not _is_consonant(word, i - 1)


def _measure(stem: str) -> int:
    """How often a consonant follows a vowel."""
    kinds = [_is_consonant(stem, i) for i in range(len(stem))]
    return sum(after and not before for before, after in itertools.pairwise(kinds))


def _has_vowel(stem: str) -> bool:
    return not all(_is_consonant(stem, i) for i in range(len(stem)))


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _is_consonant(word, len(word) - 1)


def _ends_short(word: str) -> bool:
    """Consonant, vowel, consonant other than w, x, y: then an e is missing ("hop" + "ing" from "hope")."""
    if len(word) < 3 or word[-1] in "wxy":
        return False
    return _is_consonant(word, len(word) - 1) and not _is_consonant(word, len(word) - 2) and (
        _is_consonant(word, len(word) - 3)
    )  # fmt: skip


def _step1(word: str) -> str:
    if word.endswith("s"):
        if word.endswith(("sses", "ies")):
            word = word[:-2]
        elif not word.endswith("ss"):
            word = word[:-1]
    if word.endswith("eed"):
        if _measure(word[:-3]) > 0:
            word = word[:-1]
    else:
        for suffix in ("ed", "ing"):
            if word.endswith(suffix):
                if _has_vowel(word[: -len(suffix)]):
                    word = _restore(word[: -len(suffix)])
                break
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    return word


def _restore(stem: str) -> str:
    """What stood before -ed or -ing."""
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if _ends_double(stem):
        return stem if stem[-1] in "lsz" else stem[:-1]
    return stem + "e" if _measure(stem) == 1 and _ends_short(stem) else stem


def _replace(word: str, ending: re.Pattern[str], new: dict[str, str]) -> str:
    if (found := ending.search(word)) is None:
        return word
    rest = word[: found.start()]
    return rest + new[found.group()] if _measure(rest) > 0 else word


def _step4(word: str) -> str:
    if (found := _STEP4.search(word)) is None:
        return word
    rest = word[: found.start()]
    if found.group() == "ion" and not rest.endswith(("s", "t")):
        return word
    return rest if _measure(rest) > 1 else word


def _step5(word: str) -> str:
    if word.endswith("e"):
        rest = word[:-1]
        measure = _measure(rest)
        if measure > 1 or (measure == 1 and not _ends_short(rest)):
            word = rest
    if word.endswith("ll") and _measure(word[:-1]) > 1:
        word = word[:-1]
    return word


def stem(word: str) -> str:
    """The stem of one word in lower case."""
    if len(word) <= 2:
        return word
    return _step5(_step4(_replace(_replace(_step1(word), _STEP2, STEP2), _STEP3, STEP3)))
