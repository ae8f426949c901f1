"""Strategy maps: texts -> vectors -> two coordinates, once for all runs of a page and once for each task's candidates.

    unique texts --encoder or bag of words--> (U, D) --PCA--> (U, 2)          the map of a run, over iterations
    the C candidates of one task              (C, D) --PCA--> (C, 2)          its own small map: what the selector saw

Deliberately absent: t-SNE and UMAP (their distances mean nothing, and they would be one more dependency).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

MAX_WORDS = 1000  # the most frequent ones make the bag
MAX_TEXTS = 2000  # texts on the map: a small encoder takes some 20 seconds for them on one core
PORTION = 64  # texts encoded between two steps of the progress bar

Array = Any  # numpy array


def add_maps(runs: Sequence[dict[str, Any]], method: str, most: int = MAX_TEXTS) -> dict[str, Any] | None:
    """Give every run `xy` (per text) and every group `local` (per candidate); returns what the page says of the map.

    method  auto: the encoder of the first run where it loads, else words | encoder | words | none
    most    texts that are placed: those of iterations spread evenly over each run (0: all). The others have null for
            a place.
    ValueError where `encoder` is asked for and does not load.
    """
    texts = choose_texts(runs, most)
    if method == "none" or not texts:
        return None
    vectors, how = embed(texts, runs[0]["config"], method)
    xy, explained = project(vectors)
    place = {text: i for i, text in enumerate(texts)}
    for run in runs:
        rows = [place.get(text) for text in run["texts"]]
        run["xy"] = [None if row is None else np.round(xy[row], 4).tolist() for row in rows]
        for group in run["groups"]:
            own = [rows[number] for number in group["candidates"]]
            if own and None not in own:
                group["local"] = np.round(project(vectors[own])[0], 3).tolist()
    whole = len({text for run in runs for text in run["texts"]})
    return {"how": how, "explained": round(explained, 4), "placed": len(texts), "texts": whole}


def choose_texts(runs: Sequence[dict[str, Any]], most: int) -> list[str]:
    """Different texts of whole iterations until there are `most`: the first and the last, then those between them."""
    chosen: dict[str, None] = {}
    for run in runs:
        share = len(chosen) + most // len(runs)
        of_iteration: dict[int, list[int]] = {}
        for group in run["groups"]:
            numbers = [*group["candidates"], *(s["text"] for s in group["strategies"])]
            of_iteration.setdefault(group["i"], []).extend(numbers)
        for numbers in _spread(list(of_iteration.values())):
            if most and len(chosen) >= share:
                break
            chosen.update(dict.fromkeys(run["texts"][number] for number in numbers))
    return list(chosen)


def _spread(items: Sequence[Any]) -> list[Any]:
    """The items in an order in which every beginning is spread over all of them: ends first, then middles of gaps."""
    order: dict[int, None] = dict.fromkeys((0, len(items) - 1) if items else ())
    step = len(items)
    while len(order) < len(items):
        step = max(1, step // 2)
        order.update(dict.fromkeys(range(0, len(items), step)))
    return [items[i] for i in order]


def embed(texts: Sequence[str], config: dict[str, Any], method: str) -> tuple[Array, str]:
    """(U, D) unit vectors of the texts, and how they were made, in words."""
    if method != "words":
        model = config.get("model")
        name = model.get("encoder") if isinstance(model, dict) else None
        try:
            return _encode(texts, str(name or "minilm")), f"embeddings of {name or 'minilm'}"
        except (ValueError, OSError, ImportError) as error:
            if method == "encoder":
                raise ValueError(f"--map encoder must find the run's model.encoder, got {name!r}: {error}") from error
            print(f"the map counts words, since the encoder does not load: {error}", file=sys.stderr)
    return bag_of_words(texts), "words in common (no encoder was used)"


def _encode(texts: Sequence[str], name: str) -> Array:
    from hsg.model.models import load_encoder

    encoder = load_encoder(name, "cuda" if torch.cuda.is_available() else "cpu")
    order = sorted(texts, key=len)  # short ones together: nothing is padded far
    parts = []
    with tqdm(total=len(texts), desc="map of strategies", unit="text", leave=False, disable=None) as bar:
        for begin in range(0, len(order), PORTION):
            # A text of half a surrogate pair is no text to a tokenizer.
            portion = [t.encode("utf-8", "replace").decode("utf-8") for t in order[begin : begin + PORTION]]
            parts.append(encoder.embed(portion).numpy())
            bar.update(len(portion))
    back = {text: i for i, text in enumerate(order)}
    return np.concatenate(parts)[[back[text] for text in texts]]


def bag_of_words(texts: Sequence[str]) -> Array:
    """(U, W) unit vectors of word counts weighed by rarity; zeros for a text without a known word."""
    split = [re.findall(r"\w+", text.lower()) for text in texts]
    frequency = Counter(word for words in split for word in set(words))
    place = {word: i for i, (word, _) in enumerate(frequency.most_common(MAX_WORDS))}
    counts = np.zeros((len(texts), max(len(place), 2)), dtype=np.float32)
    for row, words in enumerate(split):
        for word in words:
            if word in place:
                counts[row, place[word]] += np.log((1 + len(texts)) / frequency[word])
    return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)


def project(vectors: Array) -> tuple[Array, float]:
    """(U, D) -> (U, 2) principal components within [-1, 1], and the share of the variance that they explain.

    Zeros for directions in which nothing varies. The sign is fixed: the largest weight of a direction is positive.
    """
    centred = np.asarray(vectors, dtype=np.float64) - np.mean(vectors, axis=0)
    if len(centred) <= centred.shape[1]:  # few texts, many dimensions: the smaller square matrix has the same answer
        values, left = np.linalg.eigh(centred @ centred.T)
        directions = centred.T @ left[:, ::-1][:, :2]
    else:
        values, right = np.linalg.eigh(centred.T @ centred)
        directions = right[:, ::-1][:, :2]
    total = float(np.maximum(values, 0).sum())
    if total < 1e-9:
        return np.zeros((len(centred), 2)), 0.0
    norms = np.linalg.norm(directions, axis=0)
    directions = directions / np.where(norms > 1e-9, norms, np.inf)
    peaks = directions[np.abs(directions).argmax(axis=0), range(directions.shape[1])]
    xy = np.zeros((len(centred), 2))
    xy[:, : directions.shape[1]] = centred @ (directions * np.where(peaks < 0, -1, 1))
    return xy / np.abs(xy).max(), float(np.maximum(values[-2:], 0).sum() / total)
