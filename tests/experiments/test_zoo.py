"""The table of architectures: its small form, what it calls wrong, and the page that keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

from hsg.engine import generation
from hsg.experiments.upkeep import zoo
from hsg.model.fit import Fit

SMALL = ["llama", "gemma3", "gpt_oss", "mamba", "lfm2", "bloom"]
"""One of each sort: full attention, composite, windows with sinks and experts, states, hybrid, no cache."""


def test_small_form_is_all_trained(capsys):
    assert zoo.main(SMALL) == 0
    said = capsys.readouterr().out
    assert f"{len(SMALL)} architectures: {len(SMALL)} trained, 0 refused, 0 wrong" in said
    assert "| `llama` | sdpa | on | prefix |  |" in said
    assert "| `mamba` | eager | on, by tokens | off |" in said
    assert "| `lfm2` | sdpa | on | off |" in said
    assert "| `bloom` | eager | off | off |" in said


@pytest.mark.long
def test_whole_table_is_right_or_refused_in_one_line():
    found = list(zoo.tour(zoo.names()))
    assert [one.name for one in found if one.wrong] == []
    assert sum(one.fit is not None for one in found) >= len(found) - 4
    assert all("\n" not in one.problem for one in found)


def test_wrong_tokens_are_seen(monkeypatch, tmp_path):
    sample = generation.sample_tokens

    def second_best(logits: torch.Tensor, *given: Any) -> Any:
        return sample(logits.scatter(1, logits.argmax(1, keepdim=True), -1e9), *given)

    greedy = zoo.greedy_problem

    def among_others(policy: Any) -> str:
        monkeypatch.setattr(generation, "sample_tokens", second_best)
        return greedy(policy)

    monkeypatch.setattr(zoo, "greedy_problem", among_others)
    found = zoo.examine("llama", tmp_path)
    assert found.wrong
    assert found.problem.startswith("its greedy token after 40 is ")


def test_a_step_that_changes_nothing_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    found = zoo.examine("llama", tmp_path)
    assert found.wrong
    assert found.problem == "an optimizer step changed nothing"


def test_an_error_that_is_no_refusal_is_wrong(monkeypatch):
    def broken(name: str) -> Any:
        raise KeyError("layer_types")

    monkeypatch.setattr(zoo, "make_model", broken)
    (found,) = zoo.tour(["llama"])
    assert found.wrong
    assert found.problem == "KeyError: 'layer_types'"
    assert found.row() == "| `llama` | WRONG | | | KeyError: 'layer_types' |"


def test_page_names_every_architecture_once():
    names = zoo.names()
    assert len(names) == len(set(names)) >= 85
    assert set(names) <= set(KNOWN)
    page = zoo.DOCS.read_text(encoding="utf-8")
    table = page[page.index(zoo.MARKS[0]) : page.index(zoo.MARKS[1])]
    kept = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert kept == names, "make zoo writes the table"
    assert "WRONG" not in table


def test_table_stands_between_its_marks():
    found = {name: zoo.Found(name, Fit("sdpa", "on", "prefix")) for name in zoo.names()}
    found["llama"] = zoo.Found("llama", problem="a | b")
    page = zoo.with_tables(f"before\n{zoo.MARKS[0]}old\n{zoo.MARKS[1]}\nafter", found)
    assert page.startswith(f"before\n{zoo.MARKS[0]}")
    assert page.endswith(f"{zoo.MARKS[1]}\nafter")
    assert "old" not in page
    assert "| `llama` | refused | | | a \\| b |" in page
    assert f"{len(found)} architectures: {len(found) - 1} trained, 1 refused, 0 wrong" in page
    assert zoo.with_tables(page, found) == page
