"""What a purchase is worth, as upstream's get_reward computes it, quirks included.

    reward = type * (attributes found + options found + [price <= limit]) / (|attributes| + |options| + 1)

    type        1.0 where query, two parts of the category path or over a fifth of the title's nouns agree, else 0.5;
                whatever agrees, 0.1 where under a tenth of the nouns do, 0.0 where none does
    attribute   a fuzzy match in the product's list, or the words themselves in title, bullets or description
    option      a fuzzy match with a value that was chosen, each first cut down to the colour it contains

Quirks kept on purpose: the nouns shared are a set, yet the goal's nouns are counted with repeats; an option of a synthetic
goal is compared as the pair ("color", "dark red"), whose text holds the option's name, and as such is a colour only where
one of the two is exactly that word.  Deliberately absent: partial credit for a price above the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from hsg.environments.webshop.catalogue import Catalogue, Product

FUZZY = 85  # a ratio above it is a match
_COLOURS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
    "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal "
    "dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo "
    "ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor "
    "mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand "
    "sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut "
    "wheat white wine yellow"
)
COLOURS = tuple(_COLOURS.split())
"""Upstream's list and order: the first one that an option contains stands for it ("dark red" is "dark")."""

_LATIN_1 = dict.fromkeys(range(128, 256))  # thefuzz drops these characters and keeps all later ones


@dataclass(frozen=True)
class Purchase:
    """How a purchase fits a goal; `reward` in [0, 1]."""

    type: float
    attributes: int  # found, of `num_attributes`
    num_attributes: int
    options: int
    num_options: int
    price: bool

    @property
    def reward(self) -> float:
        found = self.attributes + self.options + self.price
        return found / (self.num_attributes + self.num_options + 1) * self.type

    def __str__(self) -> str:
        return (
            f"Attributes found: {self.attributes} of {self.num_attributes}. Options: {self.options} of "
            f"{self.num_options}. Price {'within' if self.price else 'above'} the limit. Kind of product: {self.type}."
        )


def purchase_reward(
    catalogue: Catalogue, goal: Mapping[str, Any], asin: str, price: float, options: Mapping[str, str]
) -> float:
    """The reward in [0, 1] for buying `asin` at `price` with these options; `goal` has upstream's keys.

    KeyError where the catalogue has no such product. Source: web_agent_site/engine/goal.py of WebShop.
    """
    return judge_purchase(catalogue, goal, asin, price, options).reward


def judge_purchase(
    catalogue: Catalogue, goal: Mapping[str, Any], asin: str, price: float, options: Mapping[str, str]
) -> Purchase:
    """The same with its parts."""
    product, wanted = catalogue.product(asin), goal["goal_options"]
    return Purchase(
        type=_type(catalogue, product, goal),
        attributes=sum(_has_attribute(product, attribute) for attribute in goal["attributes"]),
        num_attributes=len(goal["attributes"]),
        options=_count_options(options.values(), wanted.items() if isinstance(wanted, Mapping) else wanted),
        num_options=len(wanted),
        price=price <= goal["price_upper"],
    )


def _type(catalogue: Catalogue, product: Product, goal: Mapping[str, Any]) -> float:
    wanted = catalogue.nouns(goal["name"])
    shared = set(wanted) & set(catalogue.nouns(product.title))
    title_score = len(shared) / len(wanted) if wanted else 0.2
    if title_score == 0.0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    path, goal_path = (
        {part.strip() for part in text.split("›")} for text in (product.product_category, goal["product_category"])
    )
    fits = product.query == goal["query"] or len(path & goal_path) >= 2 or title_score > 0.2
    return 1.0 if fits else 0.5


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(fuzzy_ratio(own, attribute) > FUZZY for own in product.attributes):
        return True
    return any(attribute in text.lower() for text in (product.title, " ".join(product.bullets), product.description))


def _count_options(chosen: Iterable[str], wanted: Iterable[str | tuple[str, str]]) -> int:
    values = [colour_of(value) for value in chosen]
    return sum(any(fuzzy_ratio(value, colour_of(option)) > FUZZY for value in values) for option in wanted)


def colour_of(option: str | tuple[str, str]) -> str | tuple[str, str]:
    """The first colour that a text contains, or that is one element of a pair; without one the option itself."""
    return next((colour for colour in COLOURS if colour in option), option)


def fuzzy_ratio(one: object, other: object) -> int:
    """thefuzz.fuzz.token_set_ratio: 0..100, rounded half to even; a pair counts as Python writes it."""
    one, other = (default_process(str(text).translate(_LATIN_1)) for text in (one, other))
    return round(token_set_ratio(one, other))
