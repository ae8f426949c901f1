"""Product search: BM25 with the numbers Lucene computes, over numpy arrays.

    score(q, d) = sum over terms t of q   count(t, q) * idf(t) * tf / (tf + k1 * (1 - b + b * length(d) / mean length))
    idf(t)      = ln(1 + (N - df + 0.5) / (df + 0.5))              k1 = 0.9, b = 0.4

    postings of term i:  documents[starts[i] : starts[i+1]], weights[...]      one 4-byte number of each per (term, document)

Lucene keeps a document's length in one byte, so that lengths of 41 and 43 are the same; scores are float32 and ties go
by the document's name.  All of that decides who comes first.  Weights are worked out when the index is built, so a search
adds up slices.  Deliberately absent: deletions and additions, phrase queries, storing an index on disk.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hsg.environments.webshop.analysis import term, tokens

K1, B = 0.9, 0.4
BLOCK = 1 << 22  # postings weighted at once
WIDTH = 64  # documents in a block of `_lower_bound`
STOP = -1  # `IndexBuilder._ids` of a stop word


def _decoded_lengths() -> np.ndarray:
    """The 256 document lengths that Lucene's one byte can stand for (SmallFloat.byte4ToInt)."""
    free = 255 - _int4(2**31 - 1)
    return np.array([code if code < free else free + _int4_value(code - free) for code in range(256)], dtype=np.int64)


def _int4(value: int) -> int:
    """A number in 3 bits of mantissa and 5 of exponent (SmallFloat.longToInt4)."""
    bits = value.bit_length()
    if bits < 4:
        return value
    shift = bits - 4
    return (value >> shift) & 0x07 | (shift + 1) << 3


def _int4_value(code: int) -> int:
    mantissa, shift = code & 0x07, (code >> 3) - 1
    return mantissa if shift == -1 else (mantissa | 0x08) << shift


LENGTHS = _decoded_lengths()


def kept_length(length: np.ndarray) -> np.ndarray:
    """The length that Lucene remembers: the largest of LENGTHS that is not above it."""
    return LENGTHS[np.searchsorted(LENGTHS, length, side="right") - 1]


class IndexBuilder:
    """Takes documents one by one; about 9 bytes per (term, document) until `build`."""

    def __init__(self) -> None:
        self._vocabulary: dict[str, int] = {}
        self._ids: dict[str, int] = {}  # token -> id of its term: one look-up instead of a stem
        self._terms, self._documents, self._counts = array("i"), array("i"), array("H")
        self._lengths = array("i")

    def add(self, text: str) -> None:
        """The next document."""
        ids = self._ids
        counts = Counter([ids[token] if token in ids else self._id(token) for token in tokens(text)])
        counts.pop(STOP, None)
        self._terms.extend(counts.keys())
        self._counts.extend([min(count, 65535) for count in counts.values()])
        self._documents.extend([len(self._lengths)] * len(counts))
        self._lengths.append(sum(counts.values()))

    def _id(self, token: str) -> int:
        name = term(token)
        self._ids[token] = STOP if name is None else self._vocabulary.setdefault(name, len(self._vocabulary))
        return self._ids[token]

    def build(self, names: Sequence[str]) -> SearchIndex:
        """The finished index; `names` (one per document) break ties. The builder is empty afterwards."""
        self._ids = {}
        found = np.frombuffer(self._terms, dtype=np.int32)
        order = np.argsort(found, kind="stable")
        starts = np.zeros(len(self._vocabulary) + 1, dtype=np.int64)
        np.cumsum(np.bincount(found, minlength=len(self._vocabulary)), out=starts[1:])
        documents = np.frombuffer(self._documents, dtype=np.int32)[order]
        weights = np.frombuffer(self._counts, dtype=np.uint16)[order].astype(np.float32)
        found = found[order]  # the term of every posting
        del order
        self._terms, self._documents, self._counts = array("i"), array("i"), array("H")

        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        num_documents = len(lengths)
        mean = np.float32(lengths.sum(dtype=np.int64) / max(1, num_documents))
        # float32 throughout and in Lucene's order of operations: ties depend on the last bit.
        k1, b, one = np.float32(K1), np.float32(B), np.float32(1)
        norms = one / (k1 * ((one - b) + b * kept_length(lengths).astype(np.float32) / mean))
        frequencies = np.diff(starts)
        idfs = np.log(1 + (num_documents - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
        for begin in range(0, len(weights), BLOCK):
            here = slice(begin, begin + BLOCK)
            idf = idfs[found[here]]
            weights[here] = idf - idf / (one + weights[here] * norms[documents[here]])
        ranks = np.empty(num_documents, dtype=np.int32)
        ranks[sorted(range(num_documents), key=names.__getitem__)] = np.arange(num_documents, dtype=np.int32)
        return SearchIndex(self._vocabulary, starts, documents, weights, ranks)


class SearchIndex:
    """Postings of all documents.

    vocabulary  term -> i            starts   (V + 1) postings of term i begin here
    documents   (postings) int32     weights  (postings) float32, the term's share of the document's score
    ranks       (documents) place of the document's name among all names
    """

    def __init__(
        self,
        vocabulary: dict[str, int],
        starts: np.ndarray,
        documents: np.ndarray,
        weights: np.ndarray,
        ranks: np.ndarray,
    ) -> None:
        self._vocabulary, self._starts = vocabulary, starts
        self._documents, self._weights, self._ranks = documents, weights, ranks

    def search(self, query: str, limit: int) -> list[int]:
        """Documents that share a term with the query, best first, at most `limit`."""
        names = Counter(name for token in tokens(query) if (name := term(token)) is not None)
        slices = []
        for name, count in names.items():
            if (i := self._vocabulary.get(name)) is not None:
                slices.append((slice(self._starts[i], self._starts[i + 1]), np.float32(count)))
        if not slices or limit < 1:
            return []
        documents = np.concatenate([self._documents[here] for here, _ in slices])
        weights = np.concatenate([self._weights[here] * count for here, count in slices])
        scores = np.bincount(documents, weights, minlength=len(self._ranks)).astype(np.float32)
        found = np.flatnonzero(scores >= max(_lower_bound(scores, limit), np.finfo(np.float32).tiny))
        order = np.lexsort((self._ranks[found], -scores[found]))[:limit]
        return found[order].tolist()


def _lower_bound(scores: np.ndarray, limit: int) -> float:
    """At most the score of place `limit`: that many blocks of documents have one at least so good. Saves sorting all."""
    peaks = np.maximum.reduceat(scores, np.arange(0, len(scores), WIDTH))
    return 0.0 if len(peaks) < limit else np.partition(peaks, len(peaks) - limit)[len(peaks) - limit]
