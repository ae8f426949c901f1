"""WebShop: buy the product that an instruction asks for, in a simulated shop (Yao et al. 2022, arXiv 2207.01206).

task_set = environments.make("webshop", data="~/webshop/data")         # or data="generated"

catalogue.py       upstream's files -> products, prices, search
analysis.py        text -> index terms, as Lucene makes them; porter.py: the stemmer
search.py          BM25 with Lucene's numbers
goals.py           instructions, price limits, splits
pages.py           what a page says and what can be clicked
episode.py         Environment and TaskSet: the states of a visit
reward.py          what a purchase is worth; nouns.py: nouns of titles
expert.py          a rule-based customer; demonstrations.py: strategies with play that follows them
generate.py        a small catalogue of our own, for users without the data
scale.py           proof that 1.18 million products fit

Own engine: no Java, no web server, no language model at run time.  Data: https://github.com/princeton-nlp/WebShop, its
setup.sh downloads `data/`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

from hsg.environments.webshop import generate
from hsg.environments.webshop.catalogue import Catalogue, Size, load_catalogue
from hsg.environments.webshop.episode import Reward, WebShopTaskSet
from hsg.environments.webshop.goals import Kind, make_goals
from hsg.environments.webshop.reward import purchase_reward

__all__ = ["Catalogue", "load_catalogue", "make_task_set", "purchase_reward"]

GENERATED = "generated"
DATA_VARIABLE = "WEBSHOP_DATA"


def make_task_set(
    data: str | None = None,
    size: str = "small",
    goals: str = "synthetic",
    reward: str = "score",
    show_attributes: bool = False,
    cache_dir: str | None = None,
) -> WebShopTaskSet:
    """The task set `webshop`.

    data             folder with WebShop's files; "generated" = a catalogue of our own; None = the folder $WEBSHOP_DATA
    size             where the folder has both: "small" = 1,000 products (GiGPO, StraTA), "all" = 1.18 million
    goals            "synthetic" (6,910 for the small data) or "human" (12,087 for all; 13 for the small data)
    reward           what training maximises: "score" = the purchase's reward, "success" = 1 for a perfect purchase, else 0;
                     StepResult.score is the purchase's reward either way
    show_attributes  a page with the product's attributes, which solves much of the task; upstream leaves it out
    cache_dir        for the generated catalogue and spaCy's nouns; None = $XDG_CACHE_HOME/hsg/webshop or ~/.cache/...

    ValueError: a folder without the files, an unknown choice, more synthetic goals than fit.
    """
    for name, value, choices in (
        ("size", size, get_args(Size)),
        ("goals", goals, get_args(Kind)),
        ("reward", reward, get_args(Reward)),
    ):
        if value not in choices:
            raise ValueError(f"webshop.{name} must be one of {', '.join(choices)}, got {value!r}; see make_task_set")
    if cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsg" / "webshop"
    else:
        cache = Path(cache_dir).expanduser()
    data = data or os.environ.get(DATA_VARIABLE)
    if not data:
        raise ValueError(
            f"webshop.data must be a folder with WebShop's files or {GENERATED!r}, got {data!r}; or set {DATA_VARIABLE}"
        )
    folder = generate.cached(cache) if data == GENERATED else Path(data)
    catalogue = load_catalogue(folder, size, cache)  # type: ignore[arg-type]
    made = make_goals(catalogue, goals)  # type: ignore[arg-type]
    if len(made) < 4:
        raise ValueError(
            f"webshop.goals must give at least 4 goals, got {len(made)} {goals!r} ones; take the other kind"
        )
    return WebShopTaskSet(catalogue, made, show_attributes, reward)  # type: ignore[arg-type]
