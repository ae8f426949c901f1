"""One visit to the shop and the set of all goals, behind hsg.protocol.

    SEARCH --search--> RESULTS(page) --click asin--> ITEM --click option--> ITEM --buy now--> done
                          ^    next >, < prev          |  ^
                          +---------- < prev ----------+  +--< prev-- SUB (description, features, reviews, attributes)

    search[words]   accepted on every page          click[x]   only what the page offers, whatever the case
    anything else   changes nothing, costs a turn

reward, outcome   what training maximises: the purchase's reward, or 1 for a perfect one (option `reward`)
score             always the purchase's reward, as the benchmark reports it; success: it is exactly 1

Deliberately absent:
  1. a turn limit: the rollout has one (15 in the papers);
  2. upstream's search words for developers (<r>, <a>, <c>, <q>): they list products without ranking them;
  3. chance: the seed of an episode changes nothing, prices were drawn when the catalogue was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from hsg.environments.webshop import pages
from hsg.environments.webshop.catalogue import RESULTS, Catalogue
from hsg.environments.webshop.demonstrations import make_demonstrations
from hsg.environments.webshop.expert import play_expert
from hsg.environments.webshop.goals import SPLITS, Goal, split_goals
from hsg.environments.webshop.reward import judge_purchase
from hsg.protocol import Demonstration, Environment, StepResult, Task, TaskSet

PER_PAGE = 10
ACTION = re.compile(r"(.+)\[(.+)\]")
Reward = Literal["score", "success"]


class WebShopEpisode(Environment):
    """One session. Everything but its few fields is shared with all other sessions."""

    def __init__(self, catalogue: Catalogue, goal: Goal, show_attributes: bool, reward: Reward) -> None:
        self._catalogue, self._goal = catalogue, goal
        self._show_attributes, self._reward = show_attributes, reward
        self._instruction: str = goal["instruction_text"]
        self._state = "search"  # search, results, item, sub, done
        self._query = ""
        self._page_number = 1
        self._listed: dict[str, str] = {}  # products on the last page of results, by what is clicked
        self._asin = ""
        self._options: dict[str, str] = {}
        self._page = pages.search_page(self._instruction)
        self._score = 0.0
        self._last: StepResult | None = None

    def start(self) -> str:
        return self._page.text

    def step(self, action: str) -> StepResult:
        if self._last is not None and self._last.done:
            return replace(self._last, reward=0.0)
        match = ACTION.match(action)
        name, argument = match.groups() if match else ("", "")
        argument, valid, feedback = argument.lower(), True, None
        if name == "search":
            self._search(argument, 1)
        elif name == "click" and argument in self._page.clickables and argument != pages.SEARCH.lower():
            feedback = self._click(argument)
        else:
            valid = False
        done = self._state == "done"
        success = done and self._score == 1.0
        reward = self.outcome if done else 0.0
        self._last = StepResult(self._page.text, reward, done, success, self._score, valid, feedback)
        return self._last

    @property
    def outcome(self) -> float:
        return self._score if self._reward == "score" else float(self._score == 1.0)

    def admissible_actions(self) -> list[str]:
        """What the page offers; on the search page the one line that GiGPO's prompts have there."""
        if self._state == "search":
            return ["search[<your query>]"]
        return [f"click[{text}]" for text in self._page.clickables]

    def _click(self, text: str) -> str | None:
        """Follow a clickable, in upstream's order of cases. A purchase returns the words of its judgment."""
        if text == pages.BUY.lower():
            return self._buy()
        if text == pages.BACK.lower():
            self._state, self._asin, self._options = "search", "", {}
            self._page = pages.search_page(self._instruction)
        elif text == pages.NEXT.lower() and self._state == "results":
            self._search(self._query, self._page_number + 1)
        elif text == pages.PREV.lower() and self._state == "results":
            self._search(self._query, self._page_number - 1)
        elif text == pages.PREV.lower() and self._state == "sub":
            self._show_item()
        elif text == pages.PREV.lower() and self._state == "item":
            self._search(self._query, self._page_number)
        elif sub := next((name for name in pages.SUB_PAGES if name.lower() == text), None):
            self._state = "sub"
            self._page = pages.sub_page(self._instruction, self._catalogue.product(self._asin), sub)
        else:
            if option := self._page.clickables[text]:
                self._options[option] = text
            else:
                self._asin = self._listed[text]
            self._show_item()
        return None

    def _search(self, query: str, number: int) -> None:
        self._state, self._query, self._page_number, self._asin, self._options = "results", query, number, "", {}
        found = self._catalogue.search(query, RESULTS)
        shown = [self._catalogue.product(asin) for asin in found[(number - 1) * PER_PAGE : number * PER_PAGE]]
        self._listed = {product.asin.lower(): product.asin for product in shown}
        self._page = pages.results_page(self._instruction, shown, number, len(found))

    def _show_item(self) -> None:
        self._state = "item"
        self._page = pages.item_page(self._instruction, self._catalogue.product(self._asin), self._show_attributes)

    def _buy(self) -> str:
        price = self._catalogue.product(self._asin).price
        purchase = judge_purchase(self._catalogue, self._goal, self._asin, price, self._options)
        self._state, self._score = "done", purchase.reward
        self._page = pages.done_page(self._asin, self._options, purchase.reward)
        return str(purchase)


class WebShopTaskSet(TaskSet):
    """Goals of one catalogue. Task.id is "B09P39QN2W/17" (product / its how-manieth goal), Task.kind the category."""

    name = "webshop"
    splits = SPLITS

    def __init__(self, catalogue: Catalogue, goals: Sequence[Goal], show_attributes: bool, reward: Reward) -> None:
        self.catalogue = catalogue
        self._goals = {goal["id"]: goal for goal in goals}
        self._show_attributes, self._reward = show_attributes, reward
        self._tasks = {
            split: [Task(goals[i]["id"], split, goals[i]["category"], {"index": i}) for i in indices]
            for split, indices in split_goals(goals).items()
        }

    def tasks(self, split: str) -> list[Task]:
        if split not in self._tasks:
            raise ValueError(f"split must be one of {', '.join(self.splits)}, got {split!r}; see TaskSet.splits")
        return list(self._tasks[split])

    def goal(self, task: Task) -> Goal:
        """The goal of a task, with upstream's keys. ValueError where the catalogue has no such goal."""
        if task.id not in self._goals:
            raise ValueError(
                f"task.id must look like 'B09P39QN2W/17', got {task.id!r}; take tasks from TaskSet.tasks()"
            )
        return self._goals[task.id]

    def create(self, task: Task, seed: int) -> WebShopEpisode:
        return WebShopEpisode(self.catalogue, self.goal(task), self._show_attributes, self._reward)

    def expert_actions(self, task: Task) -> list[str] | None:
        """What the rule-based expert does, None where that does not earn the full reward."""
        actions, score = play_expert(self.create(task, seed=0))
        return actions if score == 1.0 else None

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        """Strategies that suit and that do not, each with play that follows it."""
        return make_demonstrations(task, seed, lambda: self.create(task, seed), self.goal(task))
