"""A small catalogue of our own, in the very files that WebShop's have, for users without the data and for quick runs.

    python -m hsg.environments.webshop.generate --out DIR [--num 800] [--seed 0]

    NOVALI  "Quick Dry Shirts"  $24.5   color: red, navy, teal   size: small, large   [quick dry, long sleeve, ...]

Texts are short, so that a page fits a small model.  Many products are of one kind and differ in their attributes, so a
search for the kind alone finds a wrong one first.  The same number and seed give the same bytes.  Deliberately absent: any
text of the official data; a claim that scores here say anything about WebShop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

VERSION = 1  # raise it when the same arguments give other files
NUM_PRODUCTS = 800
KINDS: dict[str, dict[str, list[str]]] = {
    "fashion": {
        "kinds": ["shirts", "shorts", "jackets", "sandals", "hats"],
        "attributes": [
            "quick dry",
            "long sleeve",
            "slim fit",
            "machine wash",
            "high waist",
            "rubber sole",
            "soft cotton",
        ],
        "color": ["black", "white", "red", "navy", "olive", "teal"],
        "size": ["small", "medium", "large"],
    },
    "beauty": {
        "kinds": ["shampoos", "lotions", "lipsticks", "perfumes"],
        "attributes": ["cruelty free", "long lasting", "tea tree", "sulfate free", "dry hair", "travel size"],
        "scent": ["rose", "lemon", "mint", "vanilla", "lavender"],
        "size": ["2 ounce", "8 ounce"],
    },
    "garden": {
        "kinds": ["lamps", "pillows", "rugs", "curtains", "shelves"],
        "attributes": ["easy clean", "solid wood", "stain resistant", "living room", "space saving", "hand made"],
        "color": ["gray", "brown", "beige", "green", "ivory"],
        "size": ["small", "large"],
    },
    "electronics": {
        "kinds": ["speakers", "chargers", "keyboards", "headphones"],
        "attributes": [
            "fast charging",
            "water proof",
            "noise cancelling",
            "high speed",
            "light weight",
            "easy install",
        ],
        "color": ["black", "silver", "white", "pink"],
        "style": ["wired", "wireless"],
    },
    "grocery": {
        "kinds": ["teas", "cookies", "nuts", "sauces"],
        "attributes": ["gluten free", "low sugar", "non gmo", "plant based", "dairy free", "high protein"],
        "flavor": ["honey", "ginger", "cocoa", "apple", "chili"],
        "pack": ["pack of 1", "pack of 6"],
    },
}
CONSONANTS, VOWELS = "BDFGKLMNPRSTVZ", "AEIOU"


def make_files(folder: Path, num_products: int = NUM_PRODUCTS, seed: int = 0) -> None:
    """Write items_shuffle.json, items_ins_v2.json, items_human_ins.json and title_nouns.json."""
    rng = random.Random(f"webshop/{VERSION}/{seed}")
    syllables = ["".join(pair) for pair in itertools.product(CONSONANTS, VOWELS)]
    names = rng.sample(["".join(three) for three in itertools.product(syllables, repeat=3)], num_products)
    products, facts, human, nouns = [], {}, {}, {}
    for name in names:
        category = rng.choice(list(KINDS))
        product, fact = _product(name, category, rng)
        products.append(product)
        facts[name] = fact
        nouns[product["name"]] = [product["query"]]
        if rng.random() < 0.25:
            option = _any_option(product, rng)
            human[name] = [
                {
                    "instruction": f"i want {product['query']} that are {fact['attributes'][0]}, {option} please.",
                    "instruction_attributes": fact["attributes"][:1],
                    "instruction_options": [option],
                }
            ]
    contents = {"items_shuffle": products, "items_ins_v2": facts, "items_human_ins": human, "title_nouns": nouns}
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in contents.items():
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=0), encoding="utf-8")


def _product(name: str, category: str, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """One product and what items_ins_v2 says of it."""
    facts = KINDS[category]
    kind = rng.choice(facts["kinds"])
    attributes = rng.sample(facts["attributes"], 3)
    options = {
        option: sorted(rng.sample(values, rng.randint(2, min(3, len(values)))), key=values.index)
        for option, values in facts.items()
        if option not in ("kinds", "attributes")
    }
    product = {
        "asin": name,
        "name": f"{attributes[0].title()} {kind.title()}",
        "full_description": f"{name.capitalize()} makes {kind} for every day: {', '.join(attributes)}.",
        "small_description": [attribute.capitalize() for attribute in attributes],
        "pricing": f"${rng.randint(8, 140) / 2}",
        "customization_options": {
            option: [{"value": value, "image": None} for value in values] for option, values in options.items()
        },
        "category": category,
        "query": kind,
        "product_category": f"{category.title()} › {kind.title()}",
        "images": [""],
    }
    wanted = attributes[: rng.randint(1, 2)]
    return product, {
        "attributes": attributes,
        "instruction": f"Find me {' '.join(wanted)} {kind}",
        "instruction_attributes": wanted,
    }


def _any_option(product: dict[str, Any], rng: random.Random) -> str:
    values = [value["value"] for values in product["customization_options"].values() for value in values]
    return rng.choice(values)


def cached(cache: Path) -> Path:
    """The folder of the default catalogue, made now unless it is there; whoever comes second keeps the first one."""
    folder = cache / f"generated-{VERSION}"
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix="generated.", suffix=".tmp", dir=cache))
        except OSError as error:
            raise ValueError(
                f"webshop.cache_dir must be a folder that can be written, got {str(cache)!r}: {error.strerror}"
            ) from None
        make_files(draft)
        try:
            os.rename(draft, folder)
        except OSError:
            shutil.rmtree(draft)
            if not folder.is_dir():
                raise
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--num", type=int, default=NUM_PRODUCTS, help="products, at most 343,000")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_files(options.out, options.num, options.seed)
    print(f"{options.out}: {options.num} products")


if __name__ == "__main__":
    main()
