"""The products of the shop, loaded from WebShop's own files, and the search over them.

    items_shuffle[_1000].json   [{asin, name, full_description, small_description, pricing, customization_options, ...}]
    items_ins_v2[_1000].json    {asin: {attributes, instruction, instruction_attributes}}
    items_human_ins.json        {asin: [{instruction, instruction_attributes, instruction_options}]}      optional
    title_nouns.json            {title: [nouns]}                                                          optional

Each may be gzipped.  Files are read item by item and a product is kept as compressed JSON, so that the 1.18 million
products of the full data (5 GB of JSON) fit into a few gigabytes; a product is unpacked when a page shows it.  Every
episode reads this one object.  Deliberately absent: images, reviews and ratings (upstream's own text mode shows none).
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from hsg.environments.webshop.nouns import Nouns
from hsg.environments.webshop.search import IndexBuilder, SearchIndex

RESULTS = 50  # products that a search returns at most
PRICE_SEED = 0  # upstream draws prices from the global generator; this seed gives the prices of the reference purchases
NO_ATTRIBUTES = ("DUMMY_ATTR",)  # upstream's word for a product without
CHUNK = 1 << 20  # characters read at once
Size = Literal["small", "all"]


@dataclass(frozen=True)
class Product:
    """One product as the pages and the reward need it. `price` is what it costs; `price_tag` may show a range."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    options: dict[str, tuple[str, ...]]  # name -> values, all in lower case
    attributes: tuple[str, ...]
    category: str
    query: str
    product_category: str
    price: float
    price_tag: str
    instruction: str | None  # of the synthetic goals
    instruction_attributes: tuple[str, ...]

    @property
    def search_text(self) -> str:
        """What the search engine indexes."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, self.bullets[0] if self.bullets else "", options]).lower()


class Catalogue:
    """All products in the order of the file. Read-only, so any number of episodes and threads share one."""

    def __init__(
        self,
        records: dict[str, bytes],
        index: SearchIndex,
        nouns: Nouns,
        human: Mapping[str, list[dict[str, Any]]],
        random_state: Any,
    ) -> None:
        self._records, self._index = records, index
        self._asins = list(records)
        self.nouns = nouns  # title -> its nouns
        self.human_instructions = human  # asin -> instructions written by people
        self.random_state = random_state  # of the generator after the prices: upstream's goals go on from there
        self._unpacked = functools.lru_cache(maxsize=4096)(self._unpack)
        self._searched = functools.lru_cache(maxsize=4096)(self._search)

    def __len__(self) -> int:
        return len(self._asins)

    def __iter__(self) -> Iterator[Product]:
        return map(self._unpack, self._asins)

    def __contains__(self, asin: str) -> bool:
        return asin in self._records

    def product(self, asin: str) -> Product:
        """The product of that number. KeyError where there is none."""
        return self._unpacked(asin)

    def search(self, query: str, limit: int = RESULTS) -> list[str]:
        """Numbers of the products that fit the query best, best first, at most `limit`."""
        return list(self._searched(query, limit))

    def _search(self, query: str, limit: int) -> tuple[str, ...]:
        return tuple(self._asins[i] for i in self._index.search(query, limit))

    def _unpack(self, asin: str) -> Product:
        fields = json.loads(zlib.decompress(self._records[asin]))
        for name in ("bullets", "attributes", "instruction_attributes"):
            fields[name] = tuple(fields[name])
        fields["options"] = {name: tuple(values) for name, values in fields["options"].items()}
        return Product(**fields)


def load_catalogue(folder: str | Path, size: Size = "small", cache_dir: str | Path | None = None) -> Catalogue:
    """Read a folder of WebShop's files. ValueError where one is missing or cannot be read.

    size       which file to take where the folder has both: "small" = items_shuffle_1000, "all" = items_shuffle
    cache_dir  where nouns found by spaCy are kept; None: they are not
    """
    folder = Path(folder).expanduser()
    products = find_file(folder, "items_shuffle", size)
    facts_file = find_file(folder, "items_ins_v2", size)
    if products is None or facts_file is None:
        missing = "items_shuffle*.json" if products is None else "items_ins_v2*.json"
        raise ValueError(
            f"webshop.data must be a folder with items_shuffle*.json and items_ins_v2*.json, got {str(folder)!r} without "
            f"{missing}; WebShop's setup.sh downloads them, 'generated' does without"
        )
    human_file = find_file(folder, "items_human_ins", size)
    human = dict(_pairs(human_file)) if human_file else {}
    facts = {asin: json.dumps(value).encode() for asin, value in _pairs(facts_file)}

    records: dict[str, bytes] = {}
    builder, prices = IndexBuilder(), random.Random(PRICE_SEED)
    for raw in tqdm(_stream(products), desc="load products", unit="", delay=2, mininterval=0.5, leave=False):
        try:
            asin = raw["asin"]
            if asin == "nan" or len(asin) > 10 or asin in records:
                continue
            product = _normalise(raw, json.loads(facts.get(asin, b"{}")), prices)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"webshop.data must hold WebShop's own products, got another form in {products.name} "
                f"({type(error).__name__}: {error}); download it again"
            ) from error
        records[asin] = zlib.compress(json.dumps(vars(product)).encode(), 1)
        builder.add(product.search_text)
    if not records:
        raise ValueError(f"webshop.data must hold products, got none in {products.name}; download it again")
    index = builder.build(list(records))
    return Catalogue(records, index, Nouns.find(folder, cache_dir), human, prices.getstate())


def find_file(folder: Path, stem: str, size: Size = "small") -> Path | None:
    """<stem>*.json or .json.gz: of several the one of that size ("small" has a number behind the stem)."""
    found = [path for ending in (".json", ".json.gz") for path in sorted(folder.glob(f"{stem}*{ending}"))]
    wanted = re.compile(rf"{stem}_\d+\." if size == "small" else rf"{stem}\.")
    return next((path for path in found if wanted.match(path.name)), found[0] if found else None)


def _normalise(raw: dict[str, Any], facts: dict[str, Any], prices: random.Random) -> Product:
    amounts = read_prices(raw.get("pricing"))
    bullets = raw["small_description"]
    options = {}
    for name, values in (raw["customization_options"] or {}).items():
        if values is not None:
            options[name.lower()] = tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
    return Product(
        asin=raw["asin"],
        title=raw["name"],
        description=raw["full_description"],
        bullets=tuple(bullets) if isinstance(bullets, list) else (bullets,),
        options=options,
        attributes=tuple(facts.get("attributes", NO_ATTRIBUTES)),
        category=raw["category"],
        query=raw["query"].lower().strip(),
        product_category=raw["product_category"],
        price=amounts[0] if len(amounts) == 1 else prices.uniform(*amounts),
        price_tag=" to ".join(f"${amount}" for amount in amounts),
        instruction=facts.get("instruction"),
        instruction_attributes=tuple(facts.get("instruction_attributes") or ()),
    )


def read_prices(text: str | None) -> list[float]:
    """The first two numbers that follow a dollar sign; [100.0] where there is none."""
    numbers = [re.sub(r"[^\d.]", "", part) for part in (text or "").split("$")[1:]]
    return [float(number) for number in numbers if number.strip(".")][:2] or [100.0]


# ---------------------------------------------------------------------------------------------------------- streaming

_GAP = re.compile(r"[\s,:]*")


def _stream(path: Path) -> Iterator[Any]:
    """The values of a JSON array, or key, value, key, value ... of a JSON object, without the whole file in memory."""
    decode = json.JSONDecoder().raw_decode
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        text = file.read(CHUNK).lstrip()
        place = 1  # behind the opening bracket
        while True:
            place = _GAP.match(text, place).end()  # type: ignore[union-attr]
            if text[place : place + 1] in ("]", "}"):
                return
            try:
                value, place = decode(text, place)
            except json.JSONDecodeError as error:  # most likely cut by the chunk
                more = file.read(CHUNK)
                if not more:
                    raise ValueError(f"webshop.data must hold whole JSON files, got a broken {path}: {error}") from None
                text, place = text[place:] + more, 0
                continue
            yield value


def _pairs(path: Path) -> Iterator[tuple[str, Any]]:
    flat = _stream(path)
    return zip(flat, flat, strict=True)
