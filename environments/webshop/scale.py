"""Proof that the full data fit: a made-up catalogue of any size, loaded and searched, with its memory and times.

    python -m hsg.environments.webshop.scale [--products 1180000] [--queries 100]

Products are as long as the official ones (1.4 kB of text, 124 words of it indexed).  Words come from a vocabulary of
300,000 with chances of 1 / (rank + 15): as in the official 1,000, the commonest are in about half of the products, the
hundredth in a tenth, and a query meets about two postings per product, like a whole instruction there.  The files are
written to a temporary folder (2.4 GB for all) and read by `load_catalogue`, as a user's would be.  Memory is the largest
the process has had; processor time is what a search takes where nothing else wants the core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from hsg.environments.webshop.catalogue import load_catalogue

NUM_WORDS = 300_000
OFFSET = 15  # of the ranks: real text without stop words has no word as common as 1 / rank would have it
TITLE, DESCRIPTION, BULLETS, OPTIONS = (
    18,
    70,
    (20, 20, 20, 20, 20),
    16,
)  # words of a product; the first bullet is indexed
QUERY_WORDS = 28
BLOCK = 1000  # products drawn at once


def vocabulary(rng: np.random.Generator) -> list[str]:
    """Words of three to ten letters, the commonest first."""
    letters = rng.choice(list("aaabcdeeefghiiklmnooprstuv"), (NUM_WORDS, 10))
    lengths = rng.integers(3, 11, NUM_WORDS)
    return ["".join(row[:length]) for row, length in zip(letters, lengths, strict=True)]


def draw_words(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Ranks from 0 with chances of 1 / (rank + OFFSET)."""
    return (OFFSET * ((NUM_WORDS + OFFSET) / OFFSET) ** rng.random(shape) - OFFSET).astype(np.int64)


def draw_products(num_products: int, words: list[str], rng: np.random.Generator) -> Iterator[dict]:
    """Rows of items_shuffle.json."""
    length = TITLE + DESCRIPTION + sum(BULLETS) + OPTIONS
    cuts = list(itertools.accumulate((TITLE, DESCRIPTION, *BULLETS)))
    for start in range(0, num_products, BLOCK):
        for number, ranks in enumerate(draw_words(rng, (min(BLOCK, num_products - start), length)), start):
            text = [words[rank] for rank in ranks]
            parts = [" ".join(text[a:b]) for a, b in itertools.pairwise((0, *cuts))]
            yield {
                "asin": f"B{number:09d}",
                "name": parts[0],
                "full_description": parts[1],
                "small_description": parts[2:],
                "pricing": f"${number % 200 + 1}.5",
                "customization_options": {"color": [{"value": value, "image": None} for value in text[cuts[-1] :]]},
                "category": "made up",
                "query": text[0],
                "product_category": f"{text[1]} › {text[2]}",
                "images": [""],
            }


def write_files(folder: Path, num_products: int, words: list[str], rng: np.random.Generator) -> None:
    with open(folder / "items_shuffle.json", "w", encoding="utf-8") as file:
        products = tqdm(
            draw_products(num_products, words, rng), "write products", num_products, delay=2, leave=False, disable=None
        )
        for number, product in enumerate(products):
            file.write(("[" if number == 0 else ",\n") + json.dumps(product))
        file.write("]")
    with open(folder / "items_ins_v2.json", "w", encoding="utf-8") as file:
        for number in range(num_products):
            fact = {"attributes": ["long lasting", "easy clean"]}
            file.write(("{" if number == 0 else ",\n") + f'"B{number:09d}": {json.dumps(fact)}')
        file.write("}")


def peak_gigabytes() -> float:
    """The most memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 30 if sys.platform == "darwin" else 1 << 20)  # bytes there, kilobytes elsewhere


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--products", type=int, default=1_180_000)
    parser.add_argument("--queries", type=int, default=100)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    words = vocabulary(rng)
    with tempfile.TemporaryDirectory() as scratch:
        write_files(Path(scratch), options.products, words, rng)
        started = time.perf_counter()
        catalogue = load_catalogue(scratch)
        seconds = time.perf_counter() - started
    times, cpu_times = [], []
    for ranks in draw_words(rng, (options.queries, QUERY_WORDS)):
        query = " ".join(words[rank] for rank in ranks)
        started, cpu_started = time.perf_counter(), time.process_time()
        found = catalogue.search(query)
        times.append(1000 * (time.perf_counter() - started))
        cpu_times.append(1000 * (time.process_time() - cpu_started))
        assert found, query
    print(
        f"{len(catalogue):,} products: loaded in {seconds:.0f} s, peak memory {peak_gigabytes():.2f} GB, search "
        f"{statistics.median(times):.1f} ms (median of {len(times)}), at most {max(times):.1f} ms; "
        f"processor time {statistics.median(cpu_times):.1f} ms, at most {max(cpu_times):.1f} ms"
    )


if __name__ == "__main__":
    main()
