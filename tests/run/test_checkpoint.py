"""Checkpoints: model folders for other programs; whole or not there; damage is found; a full disk stops nothing."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hsg.run.checkpoint
from hsg.config.loading import make_config
from hsg.model.policy import Policy
from hsg.ranks.distributed import Distributed
from hsg.run.checkpoint import Checkpoints, newest_checkpoint, read_state, save_checkpoint
from hsg.run.tracking import RunFolder


def save(guesser: Policy, run: Path, iteration: int, **state: Any) -> Path:
    return save_checkpoint(run, f"iteration_{iteration:06d}", guesser.model, guesser.tokenizer, state)


class Part:
    """Something with a state."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_checkpoint_is_a_model_folder(guesser: Policy, tmp_path: Path) -> None:
    folder = save(guesser, tmp_path, 10, seed=3)
    assert folder == tmp_path / "checkpoints" / "iteration_000010"
    assert json.loads((folder / "state.json").read_text()) == {"seed": 3}
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    for a, b in zip(model.parameters(), guesser.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ids = guesser.chat.prompt("Guess.")
    assert AutoTokenizer.from_pretrained(folder / "model").decode(ids) == guesser.tokenizer.decode(ids)


def test_nothing_in_a_checkpoint_can_run_code(guesser: Policy, tmp_path: Path) -> None:
    """No pickle, no Python: JSON, safetensors and a chat template."""
    folder = save(guesser, tmp_path, 1, moments={"a": torch.ones(3)})
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert {".json", ".safetensors"} <= suffixes <= {".json", ".safetensors", ".jinja", ".txt"}


def test_state_comes_back_as_it_was(guesser: Policy, tmp_path: Path) -> None:
    """Numbers in every bit, tensors of every kind in their places, two that share memory."""
    shared = torch.arange(6.0, dtype=torch.float64)
    state = {
        "number": 0.1 + 0.2, "large": 2**62 + 1, "none": None, "text": "ä\n\u2028",
        "list": [1, [torch.tensor([True, False]), {"deep": torch.tensor(3)}]],
        "a.b/c": {"weight": shared, "view": shared[1:3], "empty": torch.zeros(0, 3), "half": torch.ones(2).bfloat16()},
    }  # fmt: skip
    got = read_state(save(guesser, tmp_path, 1, **state))

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        if isinstance(a, dict):
            return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        return type(a) is type(b) and a == b

    assert same(state, got)
    assert read_state(tmp_path / "checkpoints" / "iteration_000001", tensors=False)["number"] == 0.1 + 0.2


def test_parts_register_by_name_and_get_their_own_state(guesser: Policy, tmp_path: Path) -> None:
    config = make_config({"run": {"dir": str(tmp_path)}, "log": {"wandb": "disabled"}})
    run, checkpoints = RunFolder(config, "r"), Checkpoints(None, Distributed())
    checkpoints.parts |= {"buffer": Part(held=torch.tensor([1, 2])), "stage": Part(stage=4)}
    checkpoints.save(run, 7, guesser.model, guesser.tokenizer)
    later = Checkpoints(None, Distributed())
    # One that the checkpoint knows nothing of begins as it is.
    parts = {"buffer": Part(), "stage": Part(), "new": Part(fresh=True)}
    later.parts |= parts
    folder = newest_checkpoint(run.path)
    assert folder is not None
    assert later.load(folder) == 7
    assert parts["buffer"].values["held"].tolist() == [1, 2]
    assert (parts["stage"].values, parts["new"].values) == ({"stage": 4}, {"fresh": True})


# ------------------------------------------------------------------------------------------------------- which are kept


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def make_saver(guesser: Policy, folder: Path, keep: int | None) -> tuple[Path, Callable[..., None]]:
    config = make_config({"run": {"dir": str(folder)}, "log": {"wandb": "disabled"}})
    run, checkpoints = RunFolder(config, "r"), Checkpoints(keep, Distributed())
    return run.path, lambda n, **more: checkpoints.save(run, n, guesser.model, guesser.tokenizer, **more)


def test_newest_checkpoints_and_the_initial_one_are_kept(guesser: Policy, tmp_path: Path) -> None:
    run, write = make_saver(guesser, tmp_path, 2)
    half = run / "checkpoints" / ".iteration_000001_update_0003.tmp"  # of a process that was killed while it saved
    half.mkdir(parents=True)
    for iteration in (0, 2, 4, 6):
        write(iteration)
    assert not half.exists()
    assert names(run) == ["iteration_000000", "iteration_000004", "iteration_000006"]


def test_middle_of_an_update_is_kept_until_the_update_is_over(guesser: Policy, tmp_path: Path) -> None:
    run, write = make_saver(guesser, tmp_path, None)
    write(2)
    write(2, steps=3)
    assert names(run) == ["iteration_000002", "iteration_000002_update_0003"]
    assert newest_checkpoint(run) == run / "checkpoints" / "iteration_000002_update_0003"
    write(3)
    assert names(run) == ["iteration_000002", "iteration_000003"]


# -------------------------------------------------------------------------------------------------------------- damage


def test_save_cut_half_way_leaves_the_older_one(
    guesser: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B18: neither a half checkpoint under its name nor a lost older one, and the next save works."""
    save(guesser, tmp_path, 2)
    write = hsg.run.checkpoint.save_model

    def cut(folder: Path, model: Any, tokenizer: Any, **options: Any) -> None:
        write(folder, model, tokenizer, **options)
        (folder / "config.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(hsg.run.checkpoint, "save_model", cut)
    with pytest.raises(KeyboardInterrupt):
        save(guesser, tmp_path, 4)
    assert names(tmp_path) == ["iteration_000002"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "iteration_000002" / "model")
    monkeypatch.undo()
    folder = save(guesser, tmp_path, 4)
    assert names(tmp_path) == ["iteration_000002", "iteration_000004"]
    assert (folder / "model" / "config.json").is_file()


def flip(folder: Path) -> None:
    path = folder / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip, "state.safetensors has another checksum"),
    "half a file": (lambda f: (f / "state.json").write_bytes(b"{"), "state.json has another checksum"),
    "no weights": (lambda f: (f / "model/model.safetensors").unlink(), "model/model.safetensors is missing"),
    "no checksums": (lambda f: (f / "checksums.json").unlink(), "checksums.json cannot be used (FileNotFoundError)"),
    "empty checksums": (lambda f: (f / "checksums.json").write_text(""), "checksums.json cannot be used (JSONDecodeError)"),
    "strange checksums": (lambda f: (f / "checksums.json").write_text("3"), "checksums.json cannot be used (TypeError)"),
    "an empty folder": (lambda f: (shutil.rmtree(f), f.mkdir()), "checksums.json cannot be used (FileNotFoundError)"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_checkpoint_is_passed_over(
    guesser: Policy, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    break_it, message = DAMAGE[what]
    good, bad = (save(guesser, tmp_path, n, moments=torch.ones(3)) for n in (2, 4))
    assert newest_checkpoint(tmp_path) == bad
    assert capsys.readouterr().err == ""
    break_it(bad)
    assert newest_checkpoint(tmp_path) == good
    assert capsys.readouterr().err == f"checkpoint iteration_000004 is passed over: {message}\n"
    break_it(good)
    assert newest_checkpoint(tmp_path) is None
    again = save(guesser, tmp_path, 4, moments=torch.ones(3))
    assert newest_checkpoint(tmp_path) == again  # a damaged folder does not stand in the way


def test_checkpoint_without_a_part_is_passed_over(
    guesser: Policy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file of it is whole; it is of another program, say, or of another version."""
    good, bad = save(guesser, tmp_path, 2, trainer={}, learner={}), save(guesser, tmp_path, 4, trainer={})
    assert newest_checkpoint(tmp_path) == bad
    assert newest_checkpoint(tmp_path, ("trainer", "learner")) == good
    assert capsys.readouterr().err == "checkpoint iteration_000004 is passed over: state.json lacks learner\n"
    sums = json.loads((good / "checksums.json").read_text())
    (good / "state.safetensors").unlink()
    (good / "checksums.json").write_text(json.dumps({k: v for k, v in sums.items() if k != "state.safetensors"}))
    assert newest_checkpoint(tmp_path, ("trainer",)) == bad
    later = Checkpoints(None, Distributed())
    later.parts["trainer"] = Needy()
    with pytest.raises(
        ValueError, match="state.json must hold 'seconds' of the part 'trainer' to go on from it, got none"
    ):
        later.load(bad)


class Needy(Part):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        state["seconds"]


def test_what_is_still_being_written_is_no_checkpoint(guesser: Policy, tmp_path: Path) -> None:
    save(guesser, tmp_path, 2).rename(tmp_path / "checkpoints" / ".iteration_000002.tmp")
    assert newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("room", [0, 5_000, 60_000])
def test_full_disk_leaves_the_run_and_the_older_checkpoints(
    guesser: Policy, tmp_path: Path, capsys: pytest.CaptureFixture[str], room: int
) -> None:
    """No file may grow past `room` bytes, which is how a full disk looks to whoever writes."""
    run, write = make_saver(guesser, tmp_path, 1)
    write(2)
    before = {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        write(4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    err = capsys.readouterr().err
    assert err.startswith("checkpoint iteration_000004 is not written: ")
    assert err.count("\n") == 1
    assert {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()} == before
    write(4)  # there is room again: the same checkpoint is not taken for written
    assert names(run) == ["iteration_000004"]
