"""The viewer: what it reads of a run folder, what it never lets through, and the page in a real Chromium."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from browser import CHROMIUM, Browser

from hsg.experiments.view import FILES, main, to_json, token_texts, write_page
from hsg.experiments.viewer.folder import read_config, read_run
from hsg.experiments.viewer.maps import add_maps, bag_of_words, choose_texts, project

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>{{POLICY}}<!--SCRIPT-->\x00\x1b[31m\u202eevil\u2028&amp;"
NO_CHROMIUM = CHROMIUM is None and not os.environ.get("HSG_REQUIRE_CHROMIUM")  # set by .ci/run, which installs one
needs_chromium = pytest.mark.skipif(
    NO_CHROMIUM, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)


def trajectory(task: int, n: int, m: int, outcome: float | None, **more: Any) -> dict[str, Any]:
    turns = [
        {"observation": f"You see door {k}.", "response": f"<action>open {k}</action>", "action": f"open {k}", "reward": 0.0,
         "valid": True, "flagged": k == 1, "return": outcome, "advantage": 0.5 * k - m, "format_penalty": 0.0, "length_penalty": 0.0}
        for k in range(3)
    ]  # fmt: skip
    return {"kind": "trajectory", "task_id": f"find/{task}", "task_index": task, "split": "train", "seed": 2**62 + 1,
            "strategy_index": n, "rollout_index": m, "strategy": f"plan {n} of {task}", "turns": turns, "final_observation": "end",
            "outcome": outcome, "score": outcome or 0.0, "success": outcome == 1.0,
            "stop_reason": "env_error" if outcome is None else "done", "judgment": "turn 2", "error": None, **more}  # fmt: skip


def write_run(folder: Path, *, iterations: int = 2, tasks: int = 3, strategies: bool = True, rollouts: int = 4) -> Path:
    """A run folder of the documented format; outcomes 0, 0.5, 1 and none by turns."""
    (folder / "trajectories").mkdir(parents=True)
    config = {"run": {"name": folder.name}, "model": {"encoder": "missing/encoder"}, "seed": 3}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {
            "iteration": i,
            "reward/outcome": i / 10,
            "update/entropy": 1.0,
            "time/iteration_seconds": 2.0,
            "cost/environment_turns": 7,
        }
        for i in range(iterations)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluation = {
        "iteration": 0,
        "label": "warm start",
        "split": "dev",
        "num_tasks": 4,
        "num_failed": 0,
        "score": 0.5,
        "success": 0.25,
    }
    (folder / "eval.jsonl").write_text(json.dumps(evaluation) + "\n")
    for i in range(iterations):
        records: list[dict[str, Any]] = []
        for p in range(tasks):
            groups = 2 if strategies else 1
            if strategies:
                texts = [f"plan {n} of {p}" for n in range(5)]
                records.append(
                    {
                        "kind": "candidates",
                        "task_id": f"find/{p}",
                        "task_index": p,
                        "texts": texts,
                        "parsed": [True] * 5,
                        "selected": [0, 1],
                    }
                )
                records += [
                    {"kind": "strategy", "task_id": f"find/{p}", "task_index": p, "strategy_index": n, "candidate_index": n, "text": texts[n],
                     "return": 0.5, "advantage": 1.0 - 2 * n} for n in range(2)
                ]  # fmt: skip
            for n in range(groups):
                for m in range(rollouts):
                    record = trajectory(p, n, m, (0.0, 0.5, 1.0, None)[(m + n) % 4])
                    records.append(record if strategies else record | {"strategy": None})
        path = folder / "trajectories" / f"iteration_{i:06d}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def change(folder: Path, edit: Any, iteration: int = 0) -> None:
    """Edit the records of one iteration."""
    path = folder / "trajectories" / f"iteration_{iteration:06d}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    edit(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def first_trajectory(records: list[dict[str, Any]]) -> dict[str, Any]:
    return next(record for record in records if record["kind"] == "trajectory")


def data_of(page: Path) -> dict[str, Any]:
    """Everything that stands in the page's data elements."""
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([A-Za-z0-9+/=]+)</script>', page.read_text())
    return {key: json.loads(gzip.decompress(base64.b64decode(text))) for key, text in found}


# -------------------------------------------------------------------------------------------------------- reading


def test_index_and_chunks_hold_what_the_files_hold(tmp_path: Path) -> None:
    chunks: dict[str, Any] = {}
    index = read_run(write_run(tmp_path / "r"), "chunk-0", chunks.__setitem__)
    assert len(index["groups"]) == 6
    assert set(chunks) == {f"chunk-0-{i}-{p}" for i in range(2) for p in range(3)}
    assert index["trajectories"]["outcome"][:8] == [0.0, 0.5, 1.0, None, 0.5, 1.0, None, 0.0]
    assert index["trajectories"]["advantage"][:2] == [0.5, -0.5]  # means over turns of 0.5 k - m
    assert index["trajectories"]["flagged"][0] == 1
    assert [index["stops"][i] for i in index["trajectories"]["stop"][:4]] == ["done"] * 3 + ["env_error"]
    group = index["groups"][1]
    assert (index["tasks"][group["t"]], index["kinds"][group["k"]], group["start"], group["count"]) == (
        "find/1",
        "find",
        8,
        8,
    )
    assert [index["texts"][c] for c in group["candidates"]] == [f"plan {n} of 1" for n in range(5)]
    assert [(s["candidate"], s["return"], s["advantage"]) for s in group["strategies"]] == [
        (0, 0.5, 1.0),
        (1, 0.5, -1.0),
    ]
    record = chunks["chunk-0-0-0"]["trajectories"][0]
    assert record["turns"][2]["action"] == "open 2"
    assert record["seed"] == str(2**62 + 1)  # a number of the page would round it
    assert index["metrics"]["columns"]["reward/outcome"] == [0.0, 0.1]
    assert index["notes"] == []


def test_task_kind_of_the_records_wins(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", iterations=1)
    change(folder, lambda records: [record.update(task_kind="search") for record in records])
    assert read_run(folder, "c", lambda *_: None)["kinds"] == ["search"]


def test_half_a_line_and_strange_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", iterations=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 1, "reward/outc')
    path = folder / "trajectories" / "iteration_000000.jsonl"
    path.write_bytes(
        path.read_bytes()
        + b'[1]\n{"kind": 3, "task_index": 0}\n{"kind": "trajectory", "task_index": 9}\n\xff\xfe{\n{"kind": "traj'
    )
    index = read_run(folder, "c", lambda *_: None)
    assert index["notes"] == [
        "metrics.jsonl: 1 line could not be read",
        "iteration_000000.jsonl: 3 lines could not be read",
        "iteration_000000.jsonl: records without a task_index or of an unknown kind, left out: 1",
    ]
    assert index["metrics"]["iteration"] == [0]
    assert index["groups"][-1] | {"t": 0, "k": 0, "start": 0} == {
        "i": 0,
        "p": 9,
        "t": 0,
        "k": 0,
        "start": 0,
        "count": 1,
        "candidates": [],
        "strategies": [],
        "learns": None,
    }


def test_turns_that_are_no_list_are_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", iterations=1)
    change(folder, lambda records: first_trajectory(records).update(turns=5))
    index = read_run(folder, "c", lambda *_: None)
    assert index["trajectories"]["turns"].count(0) == 1
    assert index["notes"] == ["iteration_000000.jsonl: turns that are no objects, left out: 1"]


@pytest.mark.parametrize(("turns", "lost"), [(5, 1), (None, 0), ([1], 1), ([{}, None, "x"], 2), ({}, 1)])
def test_turns_of_a_strategy_are_no_trap(tmp_path: Path, turns: Any, lost: int) -> None:
    folder = write_run(tmp_path / "r", iterations=1)
    change(folder, lambda records: records[1].update(turns=turns))
    run = data_of(write_page([folder], tmp_path / "p.html", map_method="none"))["index"]["runs"][0]
    assert run["notes"] == [f"iteration_000000.jsonl: turns that are no objects, left out: {lost}"] * bool(lost)
    assert len(run["groups"]) == 3


@pytest.mark.parametrize("tokens", [5, "x", [1], None, {"ids": 5}, {"ids": [1]}])
def test_a_field_called_tokens_is_not_the_page_s_own(tmp_path: Path, tokens: Any) -> None:
    """Of a strategy, of a trajectory and of a turn: left out and told, whatever it holds."""
    folder = write_run(tmp_path / "r", iterations=1)

    def edit(records: list[dict[str, Any]]) -> None:
        record = first_trajectory(records)
        for owner in (records[1], record, record["turns"][1]):
            owner["tokens"] = tokens

    change(folder, edit)
    data = data_of(write_page([folder], tmp_path / "p.html", map_method="none"))
    assert data["index"]["runs"][0]["notes"] == ["iteration_000000.jsonl: fields called tokens, left out: 3"]
    assert '"tokens"' not in json.dumps(data["chunk-0-0-0"])


def test_token_fields_that_are_no_lists_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", iterations=1)
    change(folder, lambda records: first_trajectory(records).update(input_ids=[1, 2], response_mask=5))
    index = read_run(folder, "c", lambda *_: None)
    assert index["notes"] == ["iteration_000000.jsonl: token fields that are not all lists, left out: 1"]


def test_copies_beside_the_records_are_told_and_not_read(tmp_path: Path) -> None:
    """A copy's records would stand beside those of its iteration, or in their place; one that is being written is no matter."""
    folder = write_run(tmp_path / "r", iterations=3, tasks=1)
    records = folder / "trajectories"
    text = (records / "iteration_000001.jsonl").read_text()
    strange = ["iteration_000001 copy.jsonl", "iteration_00001.jsonl", "iteration_0000001.jsonl", f"iteration_{2**53}.jsonl",
               "iteration_old_000001.jsonl", "notes.txt"]  # fmt: skip
    for name in (*strange, "iteration_000003.tmp"):
        (records / name).write_text(text)
    (records / "iteration_000004.jsonl").mkdir()
    (records / "iteration_1000000.jsonl").write_text(text)
    chunks: dict[str, Any] = {}
    index = read_run(folder, "c", chunks.__setitem__)
    assert [group["i"] for group in index["groups"]] == [0, 1, 2, 1000000]
    assert [group["count"] for group in index["groups"]] == [8] * 4
    assert len(chunks) == 4
    assert index["notes"] == [
        "trajectories: 7 files are no records (iteration_000000.jsonl) and not read: iteration_0000001.jsonl, "
        "iteration_000001 copy.jsonl, iteration_000004.jsonl, iteration_00001.jsonl, iteration_9007199254740992.jsonl, ..."
    ]


def test_places_that_no_page_can_hold_are_told(tmp_path: Path) -> None:
    """A task_index past 2**53 is another one in the page's script, true is no number there, and lists have no chunk."""
    folder = write_run(tmp_path / "r", iterations=1, tasks=1)

    def edit(records: list[dict[str, Any]]) -> None:
        for record, place in zip(records[-4:], (10**30, True, None, [1]), strict=True):
            record["task_index"] = place

    change(folder, edit)
    index = read_run(folder, "c", lambda *_: None)
    assert [group["count"] for group in index["groups"]] == [4]
    assert index["notes"] == ["iteration_000000.jsonl: records without a task_index or of an unknown kind, left out: 4"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "config.yaml"])
def test_a_file_that_is_a_folder_is_told(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "r", iterations=1)
    (folder / name).unlink()
    (folder / name).mkdir()
    notes = read_run(folder, "c", lambda *_: None)["notes"]
    assert len(notes) == 1
    assert "could not be read" in notes[0]
    assert ("options" if name == "config.yaml" else name) in notes[0]


@pytest.mark.parametrize("text", ["a: !!set {x}", "a: &b [*b]", "[" * 5000, "a: b: c"])
def test_a_config_that_no_page_can_hold_is_none(text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", iterations=1)
    (folder / "config.yaml").write_text(text)
    assert write_page([folder], tmp_path / "p.html", map_method="none").is_file()
    notes: list[str] = []
    assert read_config(folder, notes) == {}
    assert [note[:28] for note in notes] == ["options could not be read: " + notes[0][27]]


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "eval.jsonl"])
def test_a_run_without_some_files_is_read(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "r")
    (folder / missing).unlink()
    assert len(read_run(folder, "c", lambda *_: None)["groups"]) == 6


def test_every_keeps_each_kth_and_the_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", iterations=6, tasks=1)
    index = read_run(folder, "c", lambda *_: None, every=2)
    assert [group["i"] for group in index["groups"]] == [0, 2, 4, 5]
    assert len(index["metrics"]["iteration"]) == 6


@pytest.mark.parametrize("place", ["record", "turn"])
def test_tokens_keep_their_places_and_values(tmp_path: Path, place: str) -> None:
    """Masks speak of the next id; only sampled places carry numbers. In window context tokens stand in each turn."""
    folder = write_run(tmp_path / "r", iterations=1)
    fields = {
        "input_ids": [5, 6, 7, 8],
        "response_mask": [0, 1, 1],
        "old_logprobs": [0.0, -0.5, -1.0],
        "temperatures": [1.0, 1.2, 0.8],
        "advantages": [0.0, 2.0, 2.0],
    }

    def edit(records: list[dict[str, Any]]) -> None:
        record = first_trajectory(records)
        (record if place == "record" else record["turns"][1]).update(fields)

    change(folder, edit)
    chunks: dict[str, Any] = {}
    index = read_run(folder, "c", chunks.__setitem__)
    record = chunks["c-0-0"]["trajectories"][0]
    owner = record if place == "record" else record["turns"][1]
    assert owner["tokens"] == {
        "ids": [5, 6, 7, 8],
        "at": [2, 3],
        "logprob": [-0.5, -1.0],
        "temperature": [1.2, 0.8],
        "advantage": [2.0, 2.0],
    }
    assert index["hasTokens"]
    notes: list[str] = []
    assert token_texts(folder, {5, 6}, notes) == {}
    assert "no checkpoint with a tokenizer" in notes[0]


def test_token_texts_come_from_the_checkpoint(tmp_path: Path, guesser_folder: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_run(tmp_path / "r", iterations=1)
    (folder / "checkpoints" / "iteration_000000").mkdir(parents=True)
    (folder / "checkpoints" / "iteration_000000" / "model").symlink_to(guesser_folder)
    ids = AutoTokenizer.from_pretrained(guesser_folder).encode("try 3", add_special_tokens=False)
    texts = token_texts(folder, {*ids, 10**9}, [])
    assert "".join(texts[i] for i in ids) == "try 3"
    assert set(texts) == set(ids)


# ----------------------------------------------------------------------------------------------------------- maps


def test_projection_is_the_two_directions_of_most_variance() -> None:
    rng = np.random.default_rng(0)
    plane = rng.normal(size=(40, 2)) * [5.0, 2.0]
    turned = np.linalg.qr(rng.normal(size=(7, 7)))[0][:2]
    for vectors in (plane @ turned, (plane @ turned)[:5]):  # more texts than dimensions, and fewer
        xy, explained = project(vectors)
        assert explained == pytest.approx(1.0)
        between = lambda points: np.linalg.norm(points[:, None] - points[None], axis=-1)  # noqa: E731
        ratio = between(vectors)[0, 1:] / between(xy)[0, 1:]
        assert ratio == pytest.approx(ratio[0])  # distances in a plane are kept, up to one factor
        assert np.abs(xy).max() == pytest.approx(1.0)


def test_projection_of_equal_texts_and_of_one_text() -> None:
    for vectors in (np.ones((3, 4)), np.ones((1, 4))):
        xy, explained = project(vectors)
        assert xy.tolist() == [[0.0, 0.0]] * len(vectors)
        assert explained == 0.0


def test_bag_of_words_by_hand() -> None:
    vectors = bag_of_words(["open the door", "Open, the DOOR!", "eat soup", ""])
    assert vectors[0] @ vectors[1] == pytest.approx(1.0)
    assert vectors[0] @ vectors[2] == pytest.approx(0.0)
    assert not vectors[3].any()


def test_texts_of_iterations_spread_evenly_are_placed() -> None:
    def group(i: int) -> dict[str, Any]:
        return {"i": i, "candidates": [2 * i, 2 * i + 1], "strategies": [{"text": 2 * i}]}

    run = {"texts": [f"t{n}" for n in range(18)], "groups": [group(i) for i in range(9)], "config": {}}
    assert choose_texts([run], 5) == ["t0", "t1", "t16", "t17", "t8", "t9"]
    assert len(choose_texts([run], 0)) == 18
    said = add_maps([run], "words", 5)
    assert said is not None
    assert (said["placed"], said["texts"]) == (6, 18)
    assert [place is not None for place in run["xy"]] == [n in (0, 1, 8, 9, 16, 17) for n in range(18)]
    assert [group["i"] for group in run["groups"] if "local" in group] == [0, 4, 8]


def test_an_encoder_that_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "r", iterations=1)
    assert main([str(folder), "--no-open", "--map", "encoder"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --map encoder must find the run's model.encoder, got 'missing/encoder'"
    )
    assert main([str(folder), "--no-open"]) == 0
    assert "counts words" in capsys.readouterr().err
    assert "words in common" in data_of(folder / "view.html")["index"]["map"]["how"]


# ----------------------------------------------------------------------------------------------------------- page


def test_what_a_model_wrote_is_nowhere_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", iterations=1)
    change(folder, lambda records: [record.update(task_id=HOSTILE, text=HOSTILE) for record in records])
    page = write_page([folder], tmp_path / "p.html", map_method="words")
    text = page.read_text()
    assert "window.hit" not in text
    assert text.count("<script>") == 1  # our own
    assert data_of(page)["index"]["runs"][0]["tasks"] == [HOSTILE]


def test_name_of_a_run_is_escaped(tmp_path: Path) -> None:
    page = write_page([write_run(tmp_path / "<b>&{{POLICY}}", iterations=1)], tmp_path / "p.html", map_method="none")
    assert "<title>&lt;b&gt;&amp;" in page.read_text()
    assert page.read_text().count("default-src 'none'") == 1


def test_json_is_strict_and_ascii() -> None:
    assert (
        to_json({"a": [float("nan"), 1.5, -float("inf")], "b": "\ud800é"})
        == r'{"a":[null,1.5,null],"b":"\ud800\u00e9"}'
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "RUN must be a run folder, got 'nowhere'"),
        ([], "the following arguments are required: RUN"),
        (["r", "--every", "0"], "--every must be >= 1, got 0"),
        (["r", "--map-texts", "-5"], "--map-texts must be >= 0, got -5; 0 places all"),
        (["r" * 300], "RUN must be a run folder, got 'rrr"),
        (["r", "--out", ""], "--out must be a file that can be written, got '.'"),
        (["r", "--out", "no/such/folder/p.html"], "--out must be a file that can be written"),
        (["r", "--map", "tsne"], "invalid choice: 'tsne'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "r", iterations=1)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("*.html*"))


# -------------------------------------------------------------------------------------------------------- Chromium


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a StraTA run full of hostile text, with tokens; of it beside a flat run; of an empty run."""
    root = tmp_path_factory.mktemp("pages")

    def edit(records: list[dict[str, Any]]) -> None:
        record = first_trajectory(records)
        record["turns"][0].update(
            observation=HOSTILE,
            response="think \ud800 " + HOSTILE,
            action=HOSTILE,
            valid=False,
            thought="per-turn " + HOSTILE,
        )
        record["turns"][1].update(strategy="turn strategy " + HOSTILE, action=None)
        record["reflection"] = {"success": False, "strategies": ["an earlier try " + HOSTILE], "feedback": None}
        record.update(judgment=HOSTILE, error=HOSTILE, stop_reason="odd" + HOSTILE, final_observation="x\n" * 60)
        record.update(
            input_ids=[1, 2, 3],
            response_mask=[0, 1],
            old_logprobs=[0, -0.7],
            temperatures=[1.0, 1.3],
            advantages=[0.0, 1.5],
        )
        for other in records:
            if other["task_index"] == 1:
                other["task_id"] = "hunt/" + HOSTILE
            if other["kind"] == "strategy":
                other["text"] = f"plan {HOSTILE}"

    main_run = write_run(root / f"a{HOSTILE[:9].replace('/', '')}", iterations=3)
    change(main_run, edit)
    flat = write_run(root / "flat", iterations=1, tasks=2, strategies=False)
    empty = root / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text("seed: 1\n")
    given = {"one": [main_run], "two": [main_run, flat], "flat": [flat], "empty": [empty]}
    return {name: write_page(folders, root / f"{name}.html", map_method="words") for name, folders in given.items()}


@pytest.fixture(scope="module")
def browser() -> Any:
    with Browser() as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_complaint(request: pytest.FixtureRequest) -> Any:
    """No page may complain, run what a model wrote, or ask for anything but itself."""
    yield
    if "browser" in request.fixturenames:
        opened = request.getfixturevalue("browser")
        assert opened.errors == []
        assert opened.evaluate("window.hit") is None
        assert all(url.startswith("file:") and url.count(".html") for url in opened.requests), opened.requests


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)")


def click(browser: Browser, selector: str, place: int = 0) -> None:
    browser.evaluate(f"document.querySelectorAll({json.dumps(selector)})[{place}].click()")
    browser.settle()


@pytest.mark.slow
@needs_chromium
def test_tree_and_transcript(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    browser.until("document.querySelectorAll('.transcript .turn').length === 3")
    assert len(texts(browser, ".row")) == 9
    assert len(texts(browser, ".strategy")) == 2
    assert [text[:2] for text in texts(browser, ".strategy:first-of-type .cell b")] == ["0", ".5", "1", "×"]
    assert "⚑ judged wasted" in texts(browser, ".turn:nth-child(2) .note")
    assert "could not be parsed, nothing sent" in texts(browser, ".turn:nth-child(2) .note")
    assert "not understood by the environment" in texts(browser, ".turn:nth-child(1) .note")
    assert texts(browser, ".turn-strategy")[0].startswith("strategy of this turnturn strategy")
    shown = texts(browser, ".transcript")[0]
    assert "</script><script>window.hit=1</script>" in shown  # as text
    assert "⟨U+0000⟩⟨U+001B⟩[31m⟨U+202E⟩evil\n&amp;" in shown
    assert "think ⟨U+D800⟩" in shown
    assert "per-turn" in shown
    assert "an earlier attempt that failed" in shown
    assert "an earlier try" in shown


@pytest.mark.slow
@needs_chromium
def test_a_link_shows_the_row_of_its_task(browser: Browser, pages: dict[str, Path]) -> None:
    browser.resize(1440, 480)
    try:
        browser.open(pages["one"], "#tab=episodes&a=0&group=8&n=0&m=0")
        browser.settle()
        inside = (
            "(() => { const row = document.querySelector('.row[aria-selected=\"true\"]')?.getBoundingClientRect(), "
        )
        inside += "list = document.querySelector('.rows').getBoundingClientRect(); "
        assert browser.evaluate(inside + "return row && row.top >= list.top - 1 && row.bottom <= list.bottom + 1; })()")
    finally:
        browser.resize(1440, 900)


@pytest.mark.slow
@needs_chromium
def test_keys_walk_tasks_and_rollouts(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    heading = "document.querySelector('.transcript h2')?.textContent"
    browser.until(f"{heading} === 'Strategy 1, rollout 1'")
    browser.press("l")
    browser.until(f"{heading} === 'Strategy 1, rollout 2'")
    browser.press("ArrowRight")
    browser.until(f"{heading} === 'Strategy 1, rollout 3'")
    browser.press("j")
    browser.until("document.querySelector('.row[aria-selected=true]').id === 'row-1'")
    assert HOSTILE[:20] in texts(browser, ".tree h2")[0]
    browser.press("]")
    browser.until("document.querySelector('.tree .head p').textContent.startsWith('iteration 1')")
    # The transcript of the new iteration is unpacked after the tree was drawn, and takes the focus of the old one away.
    for _ in range(100):
        browser.press("f")
        if browser.evaluate("document.activeElement.classList.contains('flagged')"):
            break
    browser.until("document.activeElement.classList.contains('flagged')")
    browser.press("?")
    browser.until("document.getElementById('help').open")
    browser.press("Escape")
    browser.press("c")
    browser.until("document.querySelector('.segmented [aria-pressed=true]').textContent === 'Advantage'")
    browser.press("c")
    browser.until("location.href.includes('#tab=episodes')")


@pytest.mark.slow
@needs_chromium
def test_search_and_filters(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    found = "document.querySelector('.found').textContent"
    browser.until_equal(found, "72 rollouts in 9 tasks")
    browser.press("/")
    browser.write("plan 1 of 2")
    browser.until(f"{found} === '8 of 72 rollouts in 2 tasks'")  # in iteration 0 the texts are others
    browser.evaluate(
        "document.querySelector('#search').value = ''; document.querySelector('#search').dispatchEvent(new Event('input'))"
    )
    browser.until(f"{found} === '72 rollouts in 9 tasks'")

    def choose(label: str, value: str) -> None:
        browser.evaluate(
            f"(() => {{ const s = document.querySelector('[aria-label=\"{label}\"]'); s.value = {value!r}; s.dispatchEvent(new Event('change')); }})()"
        )

    choose("Outcome", "broken")
    browser.until(f"{found} === '18 of 72 rollouts in 9 tasks'")
    choose("Outcome", "solved")
    browser.until(f"{found} === '18 of 72 rollouts in 9 tasks'")
    choose("Stop reason", "env_error")
    browser.until(f"{found} === '0 of 72 rollouts in 0 tasks'")
    choose("Outcome", "")
    browser.until(f"{found} === '18 of 72 rollouts in 9 tasks'")
    choose("Stop reason", "")
    choose("Task type", "find")
    browser.until(f"{found} === '64 of 72 rollouts in 8 tasks'")
    choose("Task type", "")
    browser.evaluate("document.querySelector('#search').value = 'per-turn'")
    browser.evaluate("document.querySelector('#search').dispatchEvent(new Event('input'))")
    browser.until(f"{found} === '0 of 72 rollouts in 0 tasks'")
    browser.evaluate(
        "document.querySelector('#search').value = 'evil'; document.querySelector('#search').dispatchEvent(new Event('input'))"
    )
    click(browser, ".filters input[type=checkbox]")  # in transcripts too
    browser.until(f"{found}.startsWith('24 of 72')")  # iteration 0: every strategy, and the task of that name


@pytest.mark.slow
@needs_chromium
def test_keys_go_on_after_a_box_was_ticked(browser: Browser, pages: dict[str, Path]) -> None:
    """A box takes no letters; the search field does."""
    browser.open(pages["one"])
    box = "document.querySelector('.filters input[type=checkbox]')"
    browser.evaluate(f"{box}.focus()")
    press = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
    browser.evaluate(press % "/")
    browser.until("document.activeElement.id === 'search'")
    browser.evaluate(press % "3")
    assert browser.evaluate("document.querySelectorAll('.card').length") == 0  # still among the episodes
    browser.evaluate(f"{box}.focus()")
    browser.evaluate(press % "3")
    browser.until("document.querySelectorAll('.card').length > 0")


@pytest.mark.slow
@needs_chromium
def test_tokens_carry_temperature_and_advantage(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    browser.until("document.querySelectorAll('.transcript .turn').length === 3")
    browser.press("t")
    browser.until("document.querySelectorAll('.tokens .token').length === 1")
    title = browser.evaluate("document.querySelector('.token').title")
    assert title == "id 3 · p 0.497 · log-prob -0.7 · temperature 1.3 · advantage +1.500"
    assert texts(browser, ".tokens")[0] == "[1] [2] [3] "
    browser.press("t")


@pytest.mark.slow
@needs_chromium
def test_two_runs_side_by_side(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two"], "#a=0&b=1")
    browser.until("document.querySelectorAll('.transcript').length === 2")
    assert len(texts(browser, ".column[data-side=b] .strategy")) == 1
    assert "no strategy" in texts(browser, ".column[data-side=b] .strategy .text")[0]
    click(browser, ".column[data-side=b] .cell", 2)
    browser.until("document.querySelector('.column[data-side=b] .transcript h2').textContent === 'Rollout 3'")
    assert texts(browser, ".column[data-side=a] .transcript h2") == ["Strategy 1, rollout 1"]
    browser.press("3")
    browser.until("document.querySelectorAll('.card svg').length >= 3")
    assert "Where the runs differ" not in texts(browser, "h2")
    assert len(texts(browser, "tbody tr")) >= 2


@pytest.mark.slow
@needs_chromium
def test_map_has_every_strategy_of_its_iterations(browser: Browser, pages: dict[str, Path]) -> None:
    """5 candidates and 2 kept of 3 tasks in 3 iterations; in the first the kept ones have one text that nobody else has."""
    browser.open(pages["one"])
    browser.press("2")
    note = "document.querySelector('.map-note').textContent.split('.')[0]"
    browser.until_equal(note, "45 candidates, 18 strategies kept, 16 different texts")
    choose = "const s = document.querySelector('.map-page input[type=range]'); s.value = %d; s.dispatchEvent(new Event('input'))"
    browser.evaluate(f"(() => {{ {choose % 1} }})()")
    browser.until_equal(note, "15 candidates, 6 strategies kept, 15 different texts")
    assert texts(browser, ".map-page output") == ["iteration 1"]
    # Pointing everywhere reads the texts; where the selector kept one, it says what that brought.
    seen = browser.evaluate("""(() => {
        const canvas = document.querySelector('.map-box canvas'), note = document.querySelector('.map-note'), seen = {};
        const box = canvas.getBoundingClientRect();
        for (let x = 4; x < box.width; x += 4) for (let y = 4; y < box.height; y += 4) {
            canvas.dispatchEvent(new MouseEvent('mousemove', { clientX: box.left + x, clientY: box.top + y }));
            const text = note.querySelector('b');
            if (text) seen[text.textContent] = note.querySelector('span').textContent;
        }
        canvas.dispatchEvent(new MouseEvent('mouseleave'));
        return seen;
    })()""")
    said = {f"plan {n} of {p}": f"drawn 1×, kept {int(n < 2)}×" for n in range(5) for p in range(3)}
    for n, advantage in ((0, "+1.00"), (1, "−1.00")):
        said |= {
            f"plan {n} of {p}": f"drawn 1×, kept 1× · mean return 0.5 · mean advantage {advantage}" for p in range(3)
        }
    assert len(seen) > 5  # others may lie on the same place
    assert seen == {text: said[text] for text in seen}
    inks = """(() => { const canvas = document.querySelector('.map-box canvas');
        const pixels = new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
        return new Set(pixels).size; })()"""
    assert browser.evaluate(inks) > 3  # discs, rings, what lies in other iterations, and nothing


@pytest.mark.slow
@needs_chromium
def test_curves_against_what_was_spent(browser: Browser, pages: dict[str, Path]) -> None:
    """Three iterations of seven turns: metrics and evaluations move to the chosen axis."""
    browser.open(pages["one"])
    browser.press("3")
    ends = "[...document.querySelectorAll('.card:has(svg) .x')].map(node => [...node.children].map(c => c.textContent).join('-'))"
    browser.until(f"{ends}.includes('0-2')")
    browser.evaluate(
        "[...document.querySelectorAll('button, label')].find(b => b.textContent === 'environment turns').click()"
    )
    browser.until(f"{ends}.includes('7-21')")


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("name", ["one", "two", "flat", "empty"])
def test_every_tab_of_every_kind_of_run(browser: Browser, pages: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Wide and narrow, light and dark: nothing complains and nothing is wider than the screen."""
    for width, scheme in ((1440, "light"), (390, "dark")):
        browser.resize(width, 844)
        browser.prefer(scheme)
        browser.open(pages[name])
        for key in "123":
            browser.press(key)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, key)
            assert len(texts(browser, "main *")) > 1
        browser.screenshot(tmp_path / "shot.png")
        assert (tmp_path / "shot.png").stat().st_size > 3000
    browser.resize(1440, 900)


@pytest.mark.slow
@needs_chromium
def test_narrow_screens_show_one_pane(browser: Browser, pages: dict[str, Path]) -> None:
    browser.resize(390, 844)
    browser.open(pages["one"])
    shown = "[...document.querySelectorAll('.pane')].filter(pane => pane.checkVisibility()).map(pane => pane.ariaLabel)"
    browser.until_equal(shown, ["Tasks"])
    click(browser, ".row", 2)
    browser.until_equal(shown, ["Strategies and rollouts"])
    click(browser, ".cell")
    browser.until_equal(shown, ["Transcript"])
    browser.until("document.querySelectorAll('.transcript .turn').length === 3")
    browser.press("Escape")
    browser.press("Escape")
    browser.until_equal(shown, ["Tasks"])
    browser.resize(1440, 900)


@pytest.mark.slow
@needs_chromium
def test_more_values_than_a_call_takes(browser: Browser, pages: dict[str, Path]) -> None:
    """1000 iterations of 16 tasks and 8 strategies are 128,000 returns; a call's arguments end near 120,000."""
    browser.open(pages["one"])
    found = browser.evaluate("""(() => {
        const many = 200000, fill = (value) => new Array(many).fill(value);
        const strategies = fill(0).map((_, n) => ({ n, text: 0, return: n === 7 ? 3 : 0.5 }));
        const run = { texts: ["x"], tasks: ["t"], kinds: [""], trajectories: { outcome: fill(0.25).with(9, 1), success: fill(0) },
            groups: [{ i: 0, p: 0, t: 0, k: 0, start: 0, count: many, strategies }] };
        prepare(run);
        const card = figure("f", [{ colour: "red", name: "r", points: strategies.map((s) => [s.n, s.return]) }]);
        return [run.mostReturn, run.groups[0].spread, card.querySelector(".hi").textContent, card.querySelector(".lo").textContent];
    })()""")
    assert found == [3, 0.75, "3", "0.5"]


def test_no_array_is_spread_into_a_maximum() -> None:
    sources = {path.name: re.sub(r"//.*", "", path.read_text()) for path in FILES.glob("*.js")}
    assert len(sources) == 8
    assert [name for name, text in sources.items() if re.search(r"Math\.(max|min)\([^;\n]*\.\.\.", text)] == []


@pytest.mark.slow
@needs_chromium
def test_notes_of_a_strange_folder_stand_on_the_page(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", iterations=1)

    def edit(records: list[dict[str, Any]]) -> None:
        records[1].update(turns=5, tokens=[1])
        first_trajectory(records)["turns"][0]["tokens"] = {"ids": 5}

    change(folder, edit)
    (folder / "trajectories" / f"iteration_old_{HOSTILE[:5].replace('/', '')}.jsonl").write_text("{}")
    browser.open(write_page([folder], tmp_path / "p.html", map_method="none"))
    browser.until("document.querySelectorAll('.transcript .turn').length === 3")
    browser.press("t")
    browser.press("3")
    browser.until("document.querySelectorAll('.note.wide').length === 3")
    assert texts(browser, ".note.wide")[0].startswith("r: trajectories: 1 file is no record (iteration_000000.jsonl)")
    browser.press("1")
    browser.press("t")


@pytest.mark.slow
@needs_chromium
def test_ten_thousand_trajectories(browser: Browser, tmp_path: Path) -> None:
    """The list holds only what is in sight, and the last task is reached with one key."""
    folder = write_run(tmp_path / "big", iterations=125, tasks=8, rollouts=5)
    page = write_page([folder], tmp_path / "big.html", map_method="words")
    browser.open(page)
    browser.until_equal("document.querySelector('.found').textContent", "10,000 rollouts in 1,000 tasks")
    assert len(texts(browser, ".row")) < 40
    browser.evaluate("document.querySelector('.rows').focus()")
    browser.press("End")
    browser.until("document.querySelector('.row[aria-selected=true]')?.id === 'row-999'")
    browser.until("document.querySelector('.tree .head p')?.textContent.startsWith('iteration 124')")
    assert len(texts(browser, ".row")) < 40


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("count", [4, 16, 40])
def test_the_headline_is_what_was_measured_last(browser: Browser, tmp_path: Path, count: int) -> None:
    """U3: a mean over nearby iterations is no value of a run, and a counter has nothing to smooth (112 is no 128)."""
    run = write_run(tmp_path / "run", iterations=1)
    lines = [
        {"iteration": i, "reward/outcome": [0.1, 0.9][i % 2], "update/optimizer_steps": 8 * (i + 1)}
        for i in range(count)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser.open(write_page([run], tmp_path / "page.html", map_method="words"))
    browser.press("3")
    card = "[...document.querySelectorAll('.card')].find(c => c.querySelector('b')?.textContent === '%s')"
    outcome, steps = card % "reward/outcome", card % "update/optimizer_steps"
    shown = ".querySelector('.readout').textContent"
    browser.until(f"!!({outcome})?.querySelector('svg') && !!({steps})?.querySelector('svg')")
    assert browser.evaluate(outcome + shown).startswith("0.9")
    assert browser.evaluate(steps + shown) == str(8 * count)
    assert browser.evaluate(f"{steps}.querySelectorAll('polyline').length") == 1
    assert browser.evaluate(f"{outcome}.querySelectorAll('polyline').length") == (2 if count == 40 else 1)
    browser.evaluate(f"""(svg => svg.dispatchEvent(new MouseEvent('mousemove',
        {{clientX: svg.getBoundingClientRect().right - 2}})))({outcome}.querySelector('svg'))""")
    under_the_pointer = browser.evaluate(outcome + shown)
    assert f"{count - 1}" in under_the_pointer
    assert "0.9" in under_the_pointer
    assert ("mean" in under_the_pointer) == (count == 40)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("advantage", "said"), [(-5.57, False), (0.0, True), (None, False)])
def test_whether_something_is_learned_is_asked_of_the_advantages(
    browser: Browser, tmp_path: Path, advantage: float | None, said: bool
) -> None:
    """U5: outcomes all 0 and one flagged turn. "Nothing to learn" stood above an advantage of -5.57."""
    run = write_run(tmp_path / "run", iterations=1, tasks=1)

    def edit(records: list[dict[str, Any]]) -> None:
        for record in records:
            record["advantage"] = 0.0 if advantage is not None else None
            record["outcome"] = 0.0
            for turn in record.get("turns", []):
                turn["advantage"] = 0.0 if advantage is not None else None
        first_trajectory(records)["turns"][1].update(advantage=advantage, flagged=True)

    change(run, edit)
    browser.open(write_page([run], tmp_path / "page.html", map_method="words"))
    browser.until("document.querySelector('.tree .head')?.textContent")
    assert ("nothing to learn" in browser.evaluate("document.querySelector('.tree .head').textContent")) == said
