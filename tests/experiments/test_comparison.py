"""Two evaluations side by side: paired by hand, of the same episodes only, what else differs told; results are checked."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from test_trainer import configure

from hsg.experiments.evaluating.comparison import check_worlds, compare, other_settings, read_result, told
from hsg.experiments.evaluating.evaluated_model import settings_of

SETTINGS = settings_of(configure(), "m", "1", "dev", "own")


def changed(**given: Any) -> dict[str, Any]:
    return settings_of(configure(**given), "other", "2", "dev", "own")


def test_comparison_by_hand() -> None:
    def summary(*successes: float) -> dict[str, Any]:
        return {
            "tasks": [
                {"task_id": f"t{i}", "num_samples": 2, "success": s, "score": 0.0} for i, s in enumerate(successes)
            ]
        }

    found = compare(summary(1.0, 1.0, 0.5, 0.0), summary(0.0, 0.0, 0.5))
    assert found["num_tasks"] == 3  # the fourth was played by one alone
    assert found["success"] == {"difference": pytest.approx(2 / 3), "p_value": 0.5, "better": 2, "worse": 0}
    assert found["score"]["p_value"] == 1.0
    with pytest.raises(ValueError, match="must have played tasks"):
        compare(summary(1.0), {"tasks": []})


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"environment": {"name": "sciworld"}}, "environment.name"),
        ({"environment": {"options": {"a": 1}}}, "environment.options"),
        ({"seed": 1}, "seed"),
        ({"rollout": {"max_turns": 9}}, "rollout.max_turns"),
        ({"rollout": {"max_tokens": 99}}, "rollout.max_tokens"),
        ({"rollout": {"max_parse_failures": 2}}, "rollout.max_parse_failures"),
    ],
)
def test_other_episodes_are_not_compared(given: dict[str, Any], key: str) -> None:
    check_worlds(SETTINGS, changed())
    with pytest.raises(ValueError, match=f"--compare must be played with {key} "):
        check_worlds(SETTINGS, changed(**given))


def test_other_settings_are_told_and_the_weights_are_none() -> None:
    assert other_settings(SETTINGS, changed()) == {}
    theirs = changed(
        temperature={"action": 0.5}, prompts={"templates": {"judgment": "x" * 50}}, environment={"train_split": "b"}
    )
    check_worlds(SETTINGS, theirs)  # which tasks a model was trained on is no matter of its evaluation
    found = other_settings(SETTINGS, theirs)
    assert found is not None
    assert found["temperature.action"] == [1.0, 0.5]
    assert told(found) == (
        "environment.train_split 'train' (theirs 'b'), prompts.templates.judgment, temperature.action 1.0 (theirs 0.5)"
    )


def test_a_result_of_an_older_version_says_less() -> None:
    old = {name: SETTINGS[name] for name in ("environment", "seed")}
    check_worlds(SETTINGS, old)
    assert other_settings(SETTINGS, old) is None
    with pytest.raises(ValueError, match="played with seed 1, got 0"):
        check_worlds(changed(seed=1), old)


TASK = {"task_id": "t1", "num_samples": 2, "success": 0.5, "score": 0.5}
RESULT = {
    "split": "dev", "settings": SETTINGS,
    "tasks": [TASK, {"task_id": "t2", "num_samples": 0, "success": None, "score": None}],
}  # fmt: skip


def test_a_result_is_read(tmp_path: Path) -> None:
    for name in ("settings", "worlds"):
        held = {**RESULT, name: RESULT["settings"]}
        (tmp_path / "a.json").write_text(json.dumps(held))
        assert read_result(tmp_path / "a.json") == {"dev": {"tasks": RESULT["tasks"], "settings": SETTINGS}}


def damaged(**given: Any) -> str:
    return json.dumps({**RESULT, **given})


def in_task(name: str, value: Any) -> str:
    held = copy.deepcopy(RESULT)
    held["tasks"][0][name] = value
    return json.dumps(held)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Expecting property name"),
        ("[]", "it holds no mapping"),
        ("[" * 200_000, "maximum recursion depth"),
        (damaged(split=None), "its split is None"),
        (damaged(settings=3), "its settings are missing"),
        (damaged(tasks=5), "its tasks are 5"),
        (damaged(tasks=[3]), "task 1 is 3"),
        (damaged(tasks=[{}]), "task_id of task 1 is None"),
        (damaged(tasks=[TASK, TASK]), "task_id of task 2 is 't1', which is there already"),
        (in_task("task_id", ["t1"]), "task_id of task 1 is ['t1']"),
        (in_task("num_samples", "2"), "num_samples of task 1 is '2'"),
        (in_task("num_samples", False), "num_samples of task 1 is False"),
        (in_task("success", "yes"), "success of task 1 is 'yes'"),
        (in_task("success", None), "success of task 1 is None"),
        (in_task("score", float("nan")), "score of task 1 is nan"),
        (in_task("score", 10**400), "score of task 1 is 1000"),
    ],
)
def test_a_result_that_is_none_is_not_compared(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_result(tmp_path / "a.json")
    assert str(caught.value).startswith(
        f"--compare must be a result of hsg evaluate, got {str(tmp_path / 'a.json')!r}: "
    )
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 500
