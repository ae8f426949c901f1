"""A customer who goes by rules and reads nothing but the pages: search, open, choose options, buy.

    search[instruction without the price]
    of the first results within the price: open, see which wanted options it has; all of them -> choose, buy
    none has all -> back to the best one

It does not know the goal's product or the reward.  Its score, over all test goals:

    python -m hsg.environments.webshop.expert --data FOLDER [--split test]
"""

from __future__ import annotations

import argparse
import re

from hsg.environments.webshop import pages
from hsg.protocol import Environment

MAX_OPENED = 4  # with four options to choose: 1 + 2 * 4 + 1 + 4 + 1 = 15 turns
PRICE_LIMIT = re.compile(r", and price lower than ([\d.]+) dollars$")
WANTED = re.compile(r"(?: with|, and) ([^,:]+): ")  # the name of an option in a synthetic instruction
BUTTONS = frozenset(text.lower() for text in (pages.BACK, pages.PREV, pages.NEXT, pages.BUY, *pages.SUB_PAGES))


def play_expert(episode: Environment) -> tuple[list[str], float]:
    """The actions of a fresh episode played to its end, and its score."""
    actions: list[str] = []

    def do(action: str) -> str:
        actions.append(action)
        return episode.step(action).observation

    instruction = episode.start().split(pages.SEPARATOR)[2]
    limit = PRICE_LIMIT.search(instruction)
    wish = PRICE_LIMIT.sub("", instruction).lower()
    num_wanted = len(WANTED.findall(wish))
    results = read_results(do(f"search[{wish}]"))
    affordable = [asin for asin, _, price in results if limit is None or price <= float(limit[1])]
    chosen: tuple[str, list[str]] | None = None
    for asin in (affordable or [asin for asin, _, _ in results])[:MAX_OPENED]:
        if chosen is not None:
            do(f"click[{pages.PREV}]")
        values = wanted_values(do(f"click[{asin}]"), episode.admissible_actions() or [], wish)
        if chosen is None or len(values) > len(chosen[1]):
            chosen = (asin, values)
        if len(values) >= num_wanted:
            break
    if chosen is None:  # nothing was found
        return actions, 0.0
    if actions[-1] != f"click[{chosen[0]}]":
        do(f"click[{pages.PREV}]")
        do(f"click[{chosen[0]}]")
    for value in chosen[1]:
        do(f"click[{value}]")
    actions.append(f"click[{pages.BUY}]")
    return actions, episode.step(actions[-1]).score


def read_results(page: str) -> list[tuple[str, str, float]]:
    """(asin, title, lowest price) of every product on a page of results."""
    nodes = page.split(pages.SEPARATOR)
    listed = nodes[nodes.index(pages.NEXT) + 1 :]
    rows = zip(listed[::3], listed[1::3], listed[2::3], strict=False)
    return [(asin, title, float(re.findall(r"[\d.]+", price)[0])) for asin, title, price in rows]


def wanted_values(page: str, admissible: list[str], wish: str) -> list[str]:
    """For every option of an item page the value that the wish names, if it names one."""
    clickable = {action[len("click[") : -1] for action in admissible} - BUTTONS
    nodes = page.split(pages.SEPARATOR)
    found: dict[str, str] = {}
    name = ""
    for node in nodes[nodes.index(pages.PREV) + 1 :]:
        if node not in clickable:
            name = node
        elif _names(wish, name, node) and len(node) > len(found.get(name, "")):
            found[name] = node
    return list(found.values())


def _names(wish: str, name: str, value: str) -> bool:
    """Whether a wish asks for this value: "color: red" in a synthetic instruction, the bare words in a human one."""
    text = f"{name}: {value}" if WANTED.search(wish) else value
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", wish) is not None


def main() -> None:
    from tqdm import tqdm

    from hsg import environments

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default=None, help="folder with WebShop's files, or 'generated'")
    parser.add_argument("--goals", default="synthetic", choices=["synthetic", "human"])
    parser.add_argument("--split", default="test", choices=["train", "dev", "test"])
    options = parser.parse_args()
    task_set = environments.make("webshop", data=options.data, goals=options.goals)
    played = [play_expert(task_set.create(task, 0)) for task in tqdm(task_set.tasks(options.split), delay=2)]  # type: ignore[arg-type]
    scores = [score for _, score in played]
    print(
        f"{len(scores)} goals of {options.split}: score {sum(scores) / len(scores):.3f}, success "
        f"{sum(score == 1.0 for score in scores) / len(scores):.3f}, turns "
        f"{sum(len(actions) for actions, _ in played) / len(scores):.1f}, at most {max(len(a) for a, _ in played)}"
    )


if __name__ == "__main__":
    main()
