"""The model that is evaluated: the newest checkpoint of a run, whole or refused; settings that tell weights apart."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path

import pytest
from test_trainer import configure
from tiny import nano_folder
from transformers import AutoTokenizer

from hsg.experiments.evaluating.evaluated_model import _dated, find_model, identity_of, numbered, settings_of


def seal(checkpoint: Path) -> None:
    """Write checksums.json over what is in a checkpoint."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    sums = {path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (checkpoint / "checksums.json").write_text(json.dumps(sums))


def make_run(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / "checkpoints" / name / "model").mkdir(parents=True)
        (folder / "checkpoints" / name / "model" / "config.json").write_text("{}")
        seal(folder / "checkpoints" / name)
    (folder / "config.yaml").write_text("{}")
    return folder


def test_model_of_a_run_is_its_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "r", *(f"iteration_{n:06d}" for n in (0, 10, 9)))
    newest = run / "checkpoints" / "iteration_000010"
    assert find_model(str(run)) == (str(newest / "model"), run / "config.yaml")
    assert find_model(str(run / "checkpoints" / "iteration_000009"))[0].endswith("iteration_000009/model")
    assert find_model(str(newest / "model")) == (str(newest / "model"), None)
    assert find_model("some/hub-id") == ("some/hub-id", None)
    monkeypatch.chdir(newest)
    assert find_model(".") == ("model", run / "config.yaml")
    with pytest.raises(ValueError, match="without one; train it on"):
        find_model(str(make_run(tmp_path / "empty")))


def test_only_what_a_run_names_a_checkpoint_is_one(tmp_path: Path) -> None:
    """One from the middle of an update is; a copy or half of one is not, whatever stands in it."""
    names = (
        "iteration_000002",
        "iteration_000002_update_0003",
        "iteration_000003.tmp",
        "iteration_000003.bak",
        "iteration_x",
    )
    run = make_run(tmp_path / "r", *names)
    assert find_model(str(run))[0] == str(run / "checkpoints" / "iteration_000002_update_0003" / "model")
    run = make_run(tmp_path / "long", "iteration_999999", "iteration_1000000")
    assert find_model(str(run))[0].endswith("iteration_1000000/model")


def test_checkpoint_is_held_against_its_checksums_of_the_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", "iteration_000001")
    checkpoint = run / "checkpoints" / "iteration_000001"
    (checkpoint / "state.json").write_text("{}")
    seal(checkpoint)
    (checkpoint / "state.json").unlink()  # most of the bytes, which an evaluation does not read
    assert find_model(str(run))[0] == str(checkpoint / "model")
    (checkpoint / "model" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"iteration_000001: model/config.json has another checksum'; train it on"):
        find_model(str(run))
    for held in ("{}", "[" * 200_000, ""):
        (checkpoint / "checksums.json").write_text(held)
        for given in (run, checkpoint, checkpoint / "model"):
            with pytest.raises(ValueError, match="iteration_000001: checksums.json "):
                find_model(str(given))


def test_settings_tell_evaluations_apart(tmp_path: Path) -> None:
    one = settings_of(configure(), "m", "1", "dev", "own")
    for other in (settings_of(configure(evaluation={"temperature": 0.5}), "m", "1", "dev", "own"),
                  settings_of(configure(), "n", "1", "dev", "own"), settings_of(configure(), "m", "2", "dev", "own"),
                  settings_of(configure(), "m", "1", "test", "own"), settings_of(configure(), "m", "1", "dev", "blank"),
                  settings_of(configure(seed=9), "m", "1", "dev", "own")):  # fmt: skip
        assert other != one
    unplayed = configure(train={"iterations": 9}, log={"quiet": False}, num_tasks=3, judge={"enabled": False})
    assert settings_of(unplayed, "m", "1", "dev", "own") == one
    keys = configure(environment={"options": {"sizes": {1: 2}}})  # JSON makes a text of the 1
    settings = settings_of(keys, "m", "1", "dev", "own")
    assert json.loads(json.dumps(settings)) == settings


def test_identity_is_of_the_contents_of_a_folder_and_the_name_of_all_else(tmp_path: Path) -> None:
    assert identity_of("some/hub-id") == "some/hub-id"
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text("x")
    assert identity_of(str(tmp_path / "a")) == identity_of(str(tmp_path / "b"))
    (tmp_path / "b" / "model.safetensors").write_text("y")
    assert identity_of(str(tmp_path / "a")) != identity_of(str(tmp_path / "b"))


def test_each_split_has_a_result_of_its_own() -> None:
    assert numbered(Path("x/q-1.5b"), "dev", 1) == Path("x/q-1.5b")
    names = [numbered(Path("x") / name, "dev", 2).name for name in ("a.json", "q-1.5b", "q-1.7b")]
    assert names == ["a-dev.json", "q-1.5b-dev.json", "q-1.7b-dev.json"]


def test_a_template_that_asks_the_clock_gives_the_settings_a_date(tmp_path: Path) -> None:
    """Samples of two days have other prompts and are not of one kind; other models know no days."""
    folder = nano_folder(tmp_path / "nano")
    assert _dated(configure(), str(folder)).prompts.date is None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ strftime_now('%d') }}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    assert _dated(configure(), str(folder)).prompts.date == datetime.date.today().isoformat()
    of_the_run = configure(prompts={"date": "2026-03-04"})
    assert _dated(of_the_run, str(folder)) == of_the_run
