"""Text to index terms, as Lucene's English analyser makes them for WebShop's product search.

    "Women's T-Shirts, 2.5 inch"  ->  tokens  Women's  T  Shirts  2.5  inch
                                  ->  terms   women    t  shirt   2.5  inch

Tokens follow the word boundaries of Unicode (UAX #29, as Lucene's StandardTokenizer applies them): "2.5", "x.y", "a:b"
and "1,000" stay whole, an ideograph and an emoji are a token each.  Then: no possessive 's, lower case, no stop words,
Porter stems.  Every character becomes a letter for its class, and one regular expression finds the words of classes.

Deliberately absent: phrase positions (BM25 does not look at them), Hebrew's quote rules, flags of two letters and
keycaps as one emoji: rare in product texts.
"""

from __future__ import annotations

import bisect
import re
import unicodedata
from collections.abc import Callable

from hsg.environments.webshop.porter import stem

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
MAX_TOKEN_CHARS = 255  # Lucene cuts longer ones

# Classes: A letter, N digit, X joiner ("_"), M between letters, D between digits, B between both, K katakana,
# I a token on its own, G emoji, E mark or invisible (belongs to what it follows), Z zero-width joiner, space other.
# Extended_Pictographic of Unicode 11, as far as it is assigned and not a letter; first and last code points.
_PICTOGRAPHS = (
    0x00A9, 0x00A9, 0x00AE, 0x00AE, 0x203C, 0x203C, 0x2049, 0x2049, 0x2122, 0x2122, 0x2139, 0x2139, 0x2194, 0x2199,
    0x21A9, 0x21AA, 0x231A, 0x231B, 0x2328, 0x2328, 0x2388, 0x2388, 0x23CF, 0x23CF, 0x23E9, 0x23F3, 0x23F8, 0x23FA,
    0x24C2, 0x24C2, 0x25AA, 0x25AB, 0x25B6, 0x25B6, 0x25C0, 0x25C0, 0x25FB, 0x25FE, 0x2600, 0x2605, 0x2607, 0x2612,
    0x2614, 0x2685, 0x2690, 0x2705, 0x2708, 0x2712, 0x2714, 0x2714, 0x2716, 0x2716, 0x271D, 0x271D, 0x2721, 0x2721,
    0x2728, 0x2728, 0x2733, 0x2734, 0x2744, 0x2744, 0x2747, 0x2747, 0x274C, 0x274C, 0x274E, 0x274E, 0x2753, 0x2755,
    0x2757, 0x2757, 0x2763, 0x2767, 0x2795, 0x2797, 0x27A1, 0x27A1, 0x27B0, 0x27B0, 0x27BF, 0x27BF, 0x2934, 0x2935,
    0x2B05, 0x2B07, 0x2B1B, 0x2B1C, 0x2B50, 0x2B50, 0x2B55, 0x2B55, 0x3030, 0x3030, 0x303D, 0x303D, 0x3297, 0x3297,
    0x3299, 0x3299, 0x1F000, 0x1F0FF, 0x1F10D, 0x1F10F, 0x1F12F, 0x1F12F, 0x1F16C, 0x1F171, 0x1F17E, 0x1F17F,
    0x1F18E, 0x1F18E, 0x1F191, 0x1F19A, 0x1F1AD, 0x1F1E5, 0x1F201, 0x1F20F, 0x1F21A, 0x1F21A, 0x1F22F, 0x1F22F,
    0x1F232, 0x1F23A, 0x1F23C, 0x1F23F, 0x1F249, 0x1F3FA, 0x1F400, 0x1F53D, 0x1F546, 0x1F64F, 0x1F680, 0x1F6FF,
    0x1F774, 0x1F77F, 0x1F7D5, 0x1F7FF, 0x1F80C, 0x1F80F, 0x1F848, 0x1F84F, 0x1F85A, 0x1F85F, 0x1F888, 0x1F88F,
    0x1F8AE, 0x1F8FF, 0x1F90C, 0x1F93A, 0x1F93C, 0x1F945, 0x1F947, 0x1FFFD,
)  # fmt: skip
_SPECIAL = {
    **dict.fromkeys(":··״‧︓﹕：", "M"),
    **dict.fromkeys(",;;։،؍٬߸⁄︐︔﹐﹔，；", "D"),
    **dict.fromkeys(".'‘’․﹒＇．", "B"),
    "\u200d": "Z",
    "\u200b": " ",
}


def _char_class(char: str) -> str:
    if char in _SPECIAL:
        return _SPECIAL[char]
    code, category = ord(char), unicodedata.category(char)
    if category == "Nd":
        return "N"
    if category == "Pc":
        return "X"
    if category in ("Mn", "Me", "Mc", "Cf"):
        return "E"
    if category[0] == "L" or category == "Nl":
        name = unicodedata.name(char, "")
        if name.startswith(("CJK ", "HIRAGANA ")):
            return "I"
        if "KATAKANA" in name:
            return "K"
        return "A"
    if 0x1F3FB <= code <= 0x1F3FF:  # skin tones
        return "E"
    # Below an even number of bounds: between two ranges.
    if bisect.bisect_right(_PICTOGRAPHS[::2], code) > bisect.bisect_left(_PICTOGRAPHS[1::2], code):
        return "G"
    return " "


class _Classes(dict[int, str]):
    """Code point -> class, worked out once for each character that occurs."""

    def __missing__(self, code: int) -> str:
        self[code] = _char_class(chr(code))
        return self[code]


_CLASSES = _Classes()
_ASCII_CLASSES = "".join(_char_class(chr(code)) for code in range(128)).ljust(256).encode()

_LETTERS = r"A[AEZ]*(?:(?:X[XEZ]*|[MB][EZ]*)?A[AEZ]*)*"
_DIGITS = r"N[NEZ]*(?:(?:X[XEZ]*|[DB][EZ]*)?N[NEZ]*)*"
_RUN = rf"(?:K[KEZ]*|(?:{_LETTERS}|{_DIGITS})+)"
_WORD = re.compile(rf"X*{_RUN}(?:X[XEZ]*{_RUN})*X*|I[EZ]*|G[EZ]*(?:(?<=Z)G[EZ]*)*")


def tokens(text: str) -> list[str]:
    """The words of a text as they stand in it."""
    if text.isascii():  # most titles; a third of the time
        classes = text.encode().translate(_ASCII_CLASSES).decode()
    else:
        classes = text.translate(_CLASSES)
    found = [text[match.start() : match.end()] for match in _WORD.finditer(classes)]
    if any(len(token) > MAX_TOKEN_CHARS for token in found):
        found = [token[i : i + MAX_TOKEN_CHARS] for token in found for i in range(0, len(token), MAX_TOKEN_CHARS)]
    return found


def term(token: str) -> str | None:
    """The index term of a token, None for a stop word."""
    if len(token) > 2 and token[-1] in "sS" and token[-2] in "'’＇":
        token = token[:-2]
    token = token.lower()
    return None if token in STOP_WORDS else stem(token)


def terms(text: str, term_of: Callable[[str], str | None] = term) -> list[str]:
    """All index terms of a text, in order, with repeats. `term_of` may be a cached `term`."""
    return [found for token in tokens(text) if (found := term_of(token)) is not None]
