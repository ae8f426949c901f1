"""What customers want: upstream's goals, in upstream's order, cut into splits.

    synthetic   instruction of a product + every combination of its options + price limit     6,910 from the small data
    human       instructions written by people + price limit                                 12,087 from the full data

    shuffled (seed 233)  ->  test = 0..499   dev = 500..1499   train = 1500..      (upstream's test, eval and train)

Below MIN_OFFICIAL goals (human ones of the small data, say) test and dev are a quarter each.  A goal is a dict with
upstream's keys.  Its id names the product and the how-manieth goal of the product it is, so it does not depend on other
products.  A product that lists a value twice has equal goals; a later split leaves out what an earlier one has.
Deliberately absent: weights (upstream samples goals by them; a training loop has its own order).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from hsg.environments.webshop.catalogue import Catalogue, Product

Kind = Literal["synthetic", "human"]
Goal = dict[str, Any]
SHUFFLE_SEED = 233
SPLITS = ("train", "dev", "test")
NUM_TEST, NUM_DEV, MIN_OFFICIAL = 500, 1000, 2000
PRICE_LIMITS = [10.0 * i for i in range(1, 100)]
NO_LIMIT = 1000000
MAX_SYNTHETIC = 2_000_000


def make_goals(catalogue: Catalogue, kind: Kind) -> list[Goal]:
    """All goals in upstream's order; the index is upstream's session number.

    ValueError for synthetic goals of a catalogue that has too many combinations of options.
    """
    generator = random.Random()
    generator.setstate(catalogue.random_state)
    make = _synthetic if kind == "synthetic" else _human
    goals = list(make(catalogue, generator))
    random.Random(SHUFFLE_SEED).shuffle(goals)
    return goals


def split_goals(goals: Sequence[Goal]) -> dict[str, list[int]]:
    """Split -> indices of goals, ascending. The three are disjoint, by index and by what is wanted."""
    official = len(goals) >= MIN_OFFICIAL
    num_test = NUM_TEST if official else len(goals) // 4
    num_dev = NUM_DEV if official else len(goals) // 4
    cuts = {"test": (0, num_test), "dev": (num_test, num_test + num_dev), "train": (num_test + num_dev, len(goals))}
    seen: set[str] = set()
    splits = {}
    for split, (start, stop) in cuts.items():
        kept = [i for i in range(start, stop) if _wish(goals[i]) not in seen]
        seen.update(_wish(goals[i]) for i in kept)
        splits[split] = kept
    return splits


def _wish(goal: Goal) -> str:
    """Equal for goals that only the draw of the order tells apart."""
    return f"{goal['asin']} {goal['instruction_text']}"


def _synthetic(catalogue: Catalogue, generator: random.Random) -> Iterator[Goal]:
    total = 0
    for product in catalogue:
        if product.instruction is None:
            continue
        limit, price_text = draw_limit(product.price, generator)
        names = sorted(product.options)
        total += math.prod(len(product.options[name]) for name in names)
        if total > MAX_SYNTHETIC:
            raise ValueError(
                f"webshop.goals must be 'human' for so many products, got 'synthetic' with over {MAX_SYNTHETIC:,} goals"
            )
        for number, values in enumerate(itertools.product(*(product.options[name] for name in names))):
            options = dict(zip(names, values, strict=True))
            listed = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = product.instruction + (f" with {listed}" if listed else "") + price_text
            yield _goal(product, number, text, product.instruction_attributes, options, limit)


def _human(catalogue: Catalogue, generator: random.Random) -> Iterator[Goal]:
    for product in catalogue:
        for number, given in enumerate(catalogue.human_instructions.get(product.asin, ())):
            attributes = given["instruction_attributes"]
            if attributes:
                limit, price_text = draw_limit(product.price, generator)
                text = given["instruction"].strip(".") + price_text
                yield _goal(product, number, text, tuple(attributes), given["instruction_options"], limit)


def draw_limit(price: float, generator: random.Random) -> tuple[float, str]:
    """A limit above the price and the words that say so: the larger of two among the next four tens."""
    above = [limit for limit in PRICE_LIMITS if limit > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(generator.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _goal(
    product: Product,
    number: int,
    text: str,
    attributes: tuple[str, ...],
    options: dict[str, str] | list[str],
    limit: float,
) -> Goal:
    return {
        "id": f"{product.asin}/{number}",
        "asin": product.asin,
        "category": product.category,
        "query": product.query,
        "name": product.title,
        "product_category": product.product_category,
        "instruction_text": text,
        "attributes": attributes,
        "price_upper": limit,
        "goal_options": options,
    }
