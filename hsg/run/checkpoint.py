"""Checkpoints: a model folder that other programs load, and beside it all that a run needs to go on exactly.

    checkpoints/iteration_000010/model              weights (safetensors), config and tokenizer
    checkpoints/iteration_000010/state.json         numbers and texts of every part of the run
    checkpoints/iteration_000010/state.safetensors  tensors of every part, AdamW's moments among them
    checkpoints/iteration_000010/checksums.json     SHA-256 of every other file

Written aside, synced to the disk and renamed: whenever a process or machine dies, the folder is whole or not there, and
what is there and damaged is found by its checksums.  Deliberately absent:
  1. pickle: a checkpoint of unknown origin must not be able to run code;
  2. states of random generators: each is made anew from the seed, the iteration and the task;
  3. a file per rank: parts hand over whole tensors, so that any number of ranks can go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hsg.learning.underway import NonfiniteError, Underway
from hsg.model.sharding import like
from hsg.ranks.distributed import Distributed
from hsg.run.tracking import RunFolder

STATE_FILES = ("state.json", "state.safetensors")


class Stateful(Protocol):
    """A part of the run that changes while it trains."""

    def state_dict(self) -> dict[str, Any]:
        """What JSON knows, and whole tensors, nested in lists and in dicts (keys: all texts, or numbers). Called on every
        rank; the main rank's is written, so a part that differs between ranks gathers what the others hold.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, in a run of any number of ranks."""


class Adapters:
    """A `Stateful` of the weights that are trained, of a model whose others never change."""

    def __init__(self, model: Any, distributed: Distributed) -> None:
        self.model, self.distributed = model, distributed

    def state_dict(self) -> dict[str, Any]:
        return {n: self.distributed.whole(p) for n, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(like(state[name], parameter))


class Checkpoints:
    """The checkpoints of one run. `parts`: whatever has a state, by name; a new one is added here and nowhere else."""

    def __init__(self, keep: int | None, distributed: Distributed) -> None:
        self.keep, self.distributed = keep, distributed
        self.parts: dict[str, Stateful] = {}
        self._saved: str | None = None  # the newest one that this process wrote or started from
        self.lost = False  # the newest one could not be written

    def save(self, run: RunFolder | None, iteration: int, model: Any, tokenizer: Any, *, steps: int = 0) -> None:
        """Write the policy and the state of all parts, unless that is what the newest checkpoint holds.

        `steps`: optimizer steps of the coming iteration that are behind it already. A disk that is full leaves the older
        checkpoints and the run as they are.
        """
        name = f"iteration_{iteration:06d}" + (f"_update_{steps:04d}" if steps else "")
        if self._saved == name:
            return
        state: dict[str, Any] = {key: part.state_dict() for key, part in self.parts.items()}
        weights = self.distributed.whole_weights(model)
        written = True
        if run is not None:
            try:
                state |= {"iteration": iteration, "run": run.state_dict()}
                save_checkpoint(run.path, name, model, tokenizer, state, weights=weights)
                self._forget(run.path, name)
            except (OSError, SafetensorError) as error:
                print(f"checkpoint {name} is not written: {error}; the run goes on", file=sys.stderr)
                written = False
        self.lost = not self.distributed.from_main(written)
        self._saved = None if self.lost else name

    def load(self, folder: Path) -> int:
        """Hand every part its state. Returns the iteration to go on with."""
        state = read_state(folder)
        for key, part in self.parts.items():
            if key in state:
                try:
                    part.load_state_dict(state[key])
                except KeyError as error:  # another version of hsg wrote it, say
                    raise ValueError(
                        f"{folder / 'state.json'} must hold {error.args[0]!r} of the part {key!r} to go on from it, got "
                        "none; delete that checkpoint, and the one before it is used"
                    ) from None
        self._saved = folder.name
        return state["iteration"]

    @contextmanager
    def rows_dumped(self, run: RunFolder | None, iteration: int, model: Any, tokenizer: Any) -> Iterator[None]:
        """Where an update ends without finite numbers, write nonfinite/: the model, and the rows of each rank as a state.

        `Underway.join([state], of=state).rows` are the rows again, to be forwarded by hand.
        """
        try:
            yield
        except NonfiniteError as error:
            state = {"iteration": iteration, **Underway(error.rows).state_dict()}
            states, weights = self.distributed.gather([state]), self.distributed.whole_weights(model)
            if run is None:
                raise
            folder = run.path / "nonfinite"
            shutil.rmtree(folder, ignore_errors=True)
            save_model(folder / "model", model, tokenizer, weights=weights)
            for rank, each in enumerate(states):
                write_state(folder / f"rank_{rank}", each)
            raise RuntimeError(f"{error}; the batch is in {folder}") from error

    def _forget(self, run: Path, newest: str) -> None:
        """Delete the oldest beyond `keep`, those from the middle of an update that is over now, and what a kill left half."""
        for folder in (run / "checkpoints").glob(".iteration_*.tmp"):
            shutil.rmtree(folder)
        others = [p for p in _folders(run) if p.name != newest]
        for folder in (p for p in others if "_update_" in p.name):
            shutil.rmtree(folder)
        if self.keep is not None:
            # The initial policy is what the first records were sampled from; it is not one of the newest.
            whole = [p for p in others if "_update_" not in p.name and p.name != "iteration_000000"]
            for folder in whole[: max(0, len(whole) + 1 - self.keep)]:
                shutil.rmtree(folder)


def save_checkpoint(
    run: Path,
    name: str,
    model: Any,
    tokenizer: Any,
    state: Mapping[str, Any],
    *,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    """Write checkpoints/<name>, whole or not at all. OSError or SafetensorError leave nothing of it behind.

    `weights`: the whole tensors of a model whose own are sharded.
    """
    folder = run / "checkpoints" / name
    temporary = folder.with_name(f".{name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        save_model(temporary / "model", model, tokenizer, weights=weights)
        write_state(temporary, state)
        sums = {path.relative_to(temporary).as_posix(): _checksum(path) for path in _files(temporary)}
        (temporary / "checksums.json").write_text(json.dumps(sums, indent=1), encoding="utf-8")
        for path in [*_files(temporary), temporary / "model", temporary]:
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one that was passed over
        temporary.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def save_model(folder: Path, model: Any, tokenizer: Any, *, weights: dict[str, Tensor] | None = None) -> None:
    """A folder like the one that the model came from, tokenizer beside the weights; of a composite one the whole again."""
    folder.mkdir(parents=True)
    if (whole := getattr(model, "whole", None)) is not None:
        whole.save(folder, model, weights)
    else:
        model.save_pretrained(folder, safe_serialization=True, **({} if weights is None else {"state_dict": weights}))
    tokenizer.save_pretrained(folder)


def newest_checkpoint(run: Path, needs: Sequence[str] = ()) -> Path | None:
    """The newest checkpoint that is whole and holds the parts it `needs`; those passed over are named on stderr."""
    for folder in reversed(_folders(run)):
        problem = damage(folder, needs)
        if problem is None:
            return folder
        print(f"checkpoint {folder.name} is passed over: {problem}", file=sys.stderr)
    return None


def damage(folder: Path, needs: Sequence[str] = (), *, model_only: bool = False) -> str | None:
    """What is wrong with a checkpoint, or None. `needs`: parts of the run that it must hold.

    `model_only`: of the model alone, for who loads nothing else; the state may then be gone.
    """
    try:
        sums = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
        wanted = sorted(name for name in sums if name.startswith("model/") or not model_only)
        if not wanted:
            return "checksums.json lists no file"
        there = {path.relative_to(folder).as_posix() for path in _files(folder)}
        if missing := sorted({*wanted, *(() if model_only else STATE_FILES)} - there):
            return f"{missing[0]} is missing"
        if wrong := [name for name in wanted if _checksum(folder / name) != sums[name]]:
            return f"{wrong[0]} has another checksum"
        held = {} if model_only else read_state(folder, tensors=False)
        lacking = [name for name in needs if name not in held]
        return f"state.json lacks {', '.join(lacking)}" if lacking else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"checksums.json cannot be used ({type(error).__name__})"


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Numbers, texts and tensors, nested in lists and dicts, into state.json and state.safetensors."""
    tensors: dict[str, Tensor] = {}
    plain = _without_tensors(state, "", tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps(plain), encoding="utf-8")
    save_file(tensors, folder / "state.safetensors")


def read_state(folder: Path, *, tensors: bool = True) -> dict[str, Any]:
    """What `save_checkpoint` was given as state, with the tensors in their places (if they are wanted)."""
    plain = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return _with_tensors(plain, load_file(folder / "state.safetensors")) if tensors else plain


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The value with {"tensor": name} in place of each tensor, which goes into `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()  # safetensors refuses tensors that share memory
        return {"tensor": path}
    if isinstance(value, Mapping):
        held = {key: _without_tensors(inner, f"{path}/{key}", tensors) for key, inner in value.items()}
        # JSON would make texts of an optimizer's numbers.
        return held if all(isinstance(key, str) for key in held) else {"pairs": [[k, v] for k, v in held.items()]}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(inner, f"{path}/{i}", tensors) for i, inner in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return tensors[value["tensor"]]
        if set(value) == {"pairs"}:
            return {key: _with_tensors(inner, tensors) for key, inner in value["pairs"]}
        return {key: _with_tensors(inner, tensors) for key, inner in value.items()}
    return [_with_tensors(inner, tensors) for inner in value] if isinstance(value, list) else value


def _folders(run: Path) -> list[Path]:
    """Checkpoints, oldest first; what is still being written begins with a dot and is not one."""
    return sorted(run.glob("checkpoints/iteration_*"))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a machine that loses its power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
