"""What can be known of a study before it is run: that its cells are possible, and the commands that run them elsewhere.

    every cell          options, prompts, splits and tasks; trainer, optimizer, judge, encoder and critic, built around a
                        stand-in model of random weights in the place of the one that is named
    every environment   one training episode is begun, which starts its engine where it has one

Deliberately absent: the weights and tokenizers that are named, and the memory that they need.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hsg.config.loading import load_config, to_dict
from hsg.config.options import Config
from hsg.experiments.studies.elsewhere import commands
from hsg.experiments.studies.file import CONFIGS, Cell, Study


def check_splits(cells: Sequence[Cell]) -> None:
    """ValueError where an environment does not have the tasks that its cells are trained on and judged by."""
    from hsg import environments
    from hsg.measure.evaluation import evaluation_tasks
    from hsg.run.build import training_tasks

    seen = []
    for cell in cells:
        config = load_config(CONFIGS / cell.base, cell.overrides)
        asked = (to_dict(config.environment), to_dict(config.tasks), config.num_tasks, cell.split)
        if asked in seen:
            continue
        seen.append(asked)
        task_set = environments.make(config.environment.name, **config.environment.options)
        try:
            training_tasks(config, task_set)
            evaluation_tasks(config, task_set, cell.split, "split")
        finally:
            task_set.close()


def dry_run(study: Study, cells: Sequence[Cell]) -> None:
    """Check every cell, then print the commands of all. ValueError where a cell is impossible.

    Where data that has to be brought is not named, cells are checked on the few tasks that are here, and that is said.
    """
    lacking = [option for option in study.needs if not all(_names_data(cell, option) for cell in cells)]
    asked, cells = cells, [with_few_tasks(cell) for cell in cells] if lacking else cells
    check_splits(cells)
    begun: list[object] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = build_stand_in(Path(scratch) / "model")
        for cell in {cell.name: cell for cell in cells}.values():
            config = load_config(CONFIGS / cell.base, cell.overrides)
            begin = to_dict(config.environment) not in begun
            begun.append(to_dict(config.environment))
            try:
                check_cell(config, model, cell.split, begin_episode=begin)
            except ValueError as error:
                raise ValueError(f"cell {cell.name}: {error}") from error
    models = {load_config(CONFIGS / cell.base, cell.overrides).model.path for cell in cells}
    print(f"# {study.title}: {len({cell.key for cell in cells})} runs; a run that is finished is not run again")
    print(
        "# checked: options, splits, tasks, prompts; trainer, judge, encoder, critic around a stand-in model; an episode"
    )
    print(f"# not checked: weights and tokenizer of {', '.join(sorted(models))}, and the memory that they need")
    for option in lacking:
        print(f"# not checked: the data. FOLDER is to be {study.needs[option]}; --set {option}=FOLDER checks it too")
    print("# afterwards: --collect in the place of --dry-run (make: COLLECT=1) makes the table")
    told: set[str] = set()
    for cell in asked:
        print(f"\n# {cell.name}, seed {cell.seed}" + (": the same run as above" if cell.key in told else ""))
        if cell.key not in told:
            folders = tuple(f"{option}=FOLDER" for option in lacking)
            print(*commands(study, dataclasses.replace(cell, overrides=(*cell.overrides, *folders))), sep="\n")
        told.add(cell.key)


def _names_data(cell: Cell, option: str) -> bool:
    """`option`: ENVIRONMENT.NAME, which a configuration keeps among the options of its environment."""
    return load_config(CONFIGS / cell.base, cell.overrides).environment.options.get(option.split(".")[1]) is not None


def with_few_tasks(cell: Cell) -> Cell:
    """The cell with one task an iteration: as much as an environment without its data may have."""
    return dataclasses.replace(cell, overrides=(*cell.overrides, "num_tasks=1", "evaluation.num_tasks=1"))


def check_cell(config: Config, model: Path, split: str, *, begin_episode: bool) -> None:
    """Build everything of a run around the model of that folder; `begin_episode`: also start one of its environments."""
    from hsg import environments
    from hsg.measure.evaluation import evaluation_tasks
    from hsg.ranks.distributed import Distributed
    from hsg.trainer import Trainer

    judge = config.judge if config.judge.model == "reference" else dataclasses.replace(config.judge, model="self")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=str(model), encoder="minilm", dtype="float32", attention="auto"),
        judge=judge,
        log=dataclasses.replace(config.log, quiet=True),
    )
    task_set = environments.make(config.environment.name, **config.environment.options)
    trainer = None
    try:
        trainer = Trainer(config, task_set, str(model), Distributed(), None)
        evaluation_tasks(config, task_set, split, "split")
        first = trainer.collector.next_tasks(0)[0]
        if begin_episode:
            environment = task_set.create(first, config.seed)
            try:
                trainer.policy.chat.prompt(trainer.collector.rollout.prompts.strategy(environment.start()))
            finally:
                environment.close()
    finally:
        if trainer is not None:
            trainer.close()
        task_set.close()


def build_stand_in(folder: Path) -> Path:
    """A model with a tokenizer and a chat format that takes a second to build and has learned nothing."""
    from hsg.config.options import NanoConfig
    from hsg.model.nano import build_nano

    shape = NanoConfig(
        vocab_size=300, hidden_size=16, num_layers=1, num_heads=1, num_key_value_heads=1, intermediate_size=16,
        max_position_embeddings=32768,
    )  # fmt: skip
    return build_nano(["Find the key. Open the trunk."], shape, folder)
