"""The pages of the shop: their text, as upstream's text mode shows it, and what can be clicked on them.

    search      WebShop [SEP] Instruction: [SEP] <goal> [SEP] Search
    results     Instruction: [SEP] <goal> [SEP] Back to Search [SEP] Page 1 (Total results: 50) [SEP] Next > [SEP] <asin> ...
    item        ... [SEP] < Prev [SEP] color [SEP] red [SEP] blue [SEP] <title> [SEP] Price: $5.0 [SEP] ... [SEP] Buy Now
    sub page    ... [SEP] < Prev [SEP] <description, features, reviews or attributes>
    done        Thank you for shopping with us! ... [SEP] <reward> ...

Upstream renders HTML and joins its visible text nodes.  `_join` keeps what that does to odd texts: an empty text is no
node, blanks with a line end in them are dropped, other blanks leave an empty place.  Deliberately absent: HTML, the
sign of a chosen option (upstream's text mode has none).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hsg.environments.webshop.catalogue import Product

SEPARATOR = " [SEP] "
ASCII_SPACES = " \n\t\f\r"
BACK, PREV, NEXT, BUY, SEARCH = "Back to Search", "< Prev", "Next >", "Buy Now", "Search"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")


@dataclass(frozen=True)
class Page:
    """text: the observation. clickables: what click[...] takes, in lower case -> the option's name, None for the rest."""

    text: str
    clickables: Mapping[str, str | None]


def _join(nodes: Iterable[str]) -> str:
    shown = []
    for node in nodes:
        blank = not node.strip(ASCII_SPACES)
        if node and not (blank and "\n" in node):
            shown.append(node.strip())
    return SEPARATOR.join(shown)


def _buttons(*texts: str) -> dict[str, str | None]:
    return dict.fromkeys(text.lower() for text in texts)


def search_page(instruction: str) -> Page:
    return Page(_join(["WebShop", "Instruction:", instruction, SEARCH]), _buttons(SEARCH))


def results_page(instruction: str, products: Sequence[Product], number: int, total: int) -> Page:
    """products: those of this page; number: of the page, from 1; total: products found."""
    moves = [PREV, NEXT] if number > 1 else [NEXT]
    nodes = ["Instruction:", instruction, BACK, f"Page {number} (Total results: {total})", *moves]
    for product in products:
        nodes += [product.asin, product.title, product.price_tag]
    return Page(_join(nodes), _buttons(BACK, *moves, *(product.asin for product in products)))


def item_page(instruction: str, product: Product, show_attributes: bool) -> Page:
    nodes = ["Instruction:", instruction, BACK, PREV]
    subs = SUB_PAGES if show_attributes else SUB_PAGES[:-1]
    clickables = _buttons(BACK, PREV, *subs, BUY)
    for name, values in product.options.items():
        nodes += [name, *values]
        # A value that two options share belongs to the later one, as in upstream's dict of clickables.
        clickables |= dict.fromkeys(values, name)
    nodes += [product.title, f"Price: {product.price_tag}", "Rating: N.A.", *subs, BUY]
    return Page(_join(nodes), clickables)


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """name: one of SUB_PAGES."""
    content: list[str] = []  # there are no reviews in the data
    if name == "Description":
        content = [product.description]
    elif name == "Features":
        content = [f" {bullet}" for bullet in product.bullets]
    elif name == "Attributes":
        content = [f" {attribute}" for attribute in product.attributes]
        content += [product.category, product.query, product.product_category]
    return Page(_join(["Instruction:", instruction, BACK, PREV, *content]), _buttons(BACK, PREV))


def done_page(asin: str, options: Mapping[str, str], reward: float) -> Page:
    """The receipt. Upstream fills in product, options and reward and leaves the rest of its form empty."""
    chosen = json.dumps(options, sort_keys=True)
    for char in "<>&'":  # as Flask writes JSON into a page
        chosen = chosen.replace(char, f"\\u{ord(char):04x}")
    bought = ["Purchased", "asin", asin, "options", chosen, "attrs", "None", "category", "None", "query", "None"]
    wanted = ["Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category"]
    nodes = ["Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)", *bought]
    nodes += ["product category", "None", *wanted, "query", "Goal", "None", "Reward"]
    nodes += ["Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"]
    return Page(_join(nodes), {})
