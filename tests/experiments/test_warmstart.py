"""The warm start: rows are what a rollout samples, wasted turns are not taught, caches are used, training learns."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time

import pytest
from tiny import nano_folder

from hsg import environments
from hsg.config.loading import make_config
from hsg.engine.generation import Sampled
from hsg.experiments import warmstart
from hsg.experiments.imitation import demonstrations, supervised
from hsg.experiments.imitation.demonstrations import (
    CONTEXT,
    FORMS,
    collect,
    expert_demonstrations,
    make_rows,
    play_demonstrations,
)
from hsg.model.models import load_model, load_tokenizer
from hsg.play.episode import Episode, Request
from hsg.play.pool import Pool
from hsg.protocol import Demonstration, EnvironmentFault
from hsg.ranks import stopping
from hsg.text.chat import ChatFormat
from hsg.text.prompts import Prompts, parse_action, parse_judgment, parse_strategy, parse_turn_strategy, turn_response
from hsg.types import Attempt, Reflection

STRATEGY, ACTION, PLAIN, JUDGMENT, TURN, REFLECTION = range(6)


def config_for(tmp_path, **sections):
    nano = {"vocab_size": 330, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_key_value_heads": 1,
            "intermediate_size": 64, "max_position_embeddings": 512}  # fmt: skip
    settings = {"cache_dir": str(tmp_path / "cache"), "num_tasks": 12, "seconds": 60.0, "epochs": 2.0,
                "batch_tokens": 1024, "lr": 5e-3, "nano": nano}  # fmt: skip
    settings |= sections.pop("warmstart", {})
    rollout = {"max_turns": 8, "env_threads": 2} | sections.pop("rollout", {})
    given = {"prompts": {"style": "terse"}, "log": {"quiet": True}, "warmstart": settings, "rollout": rollout}
    return make_config(given | sections)


@pytest.fixture(scope="module")
def task_set():
    made = environments.make("toy", num_train=40)
    yield made
    made.close()


@pytest.fixture(scope="module")
def form(tmp_path_factory):
    return ChatFormat(load_tokenizer(nano_folder(tmp_path_factory.mktemp("nano"))))


def taught(row, form):
    """[(form index, text)] of every run of taught tokens, each ending at the end token."""
    spans, ids, kind = [], [], CONTEXT
    for token, value in zip(row.ids[1:], row.forms, strict=True):
        if value == CONTEXT:
            assert not ids, "a taught response must end with the end token"
            continue
        ids, kind = [*ids, token], value
        if token == form.end_id:
            spans.append((kind, form.decode(ids)))
            ids = []
    return spans


def test_every_form_is_there_and_exactly_the_responses_are_taught(tmp_path, task_set, form):
    config = config_for(tmp_path)
    played, _ = collect(config, task_set)
    rows = make_rows(config, played, form, 512)
    seen = {name: 0 for name in FORMS}
    for row in rows:
        assert len(row.forms) == len(row.ids) - 1
        for kind, text in taught(row, form):
            seen[FORMS[kind]] += 1
            parsers = {
                STRATEGY: [parse_strategy], ACTION: [parse_action], PLAIN: [parse_action],
                TURN: [parse_turn_strategy, parse_action], REFLECTION: [parse_turn_strategy],
                JUDGMENT: [lambda text: parse_judgment(text, 8)],
            }[kind]  # fmt: skip
            assert all(parse(text) is not None for parse in parsers), (kind, text)
    assert all(seen.values()), seen


@pytest.mark.parametrize("context", ["conversation", "window"])
@pytest.mark.parametrize("kind", [ACTION, PLAIN, TURN, REFLECTION])
def test_rows_are_what_an_episode_of_the_rollout_holds(tmp_path, task_set, form, context, kind):
    """The real Episode plays a demonstration as a scripted policy; its rows must be the warm start's."""
    rollout = {"context": context, "admissible_actions": True}
    shares = {"share_plain": 1.0, "share_action": 1.0, "share_turn": 1.0, "share_reflection": 1.0}
    per_turn = kind in (TURN, REFLECTION)
    config = config_for(tmp_path, rollout=rollout, warmstart=shares, prompts={"style": "full"})
    played, _ = collect(config, task_set)
    if kind == REFLECTION:  # nothing is taught after an earlier attempt but play that fits the task
        item = next(p for p in played if p.fits and not p.wasted)
    else:
        item = next(p for p in played if p.wasted and min(p.wasted) > 2 and not p.success)
    assert set(item.turn_strategies) != {item.strategy}
    prompts = Prompts.make("full", per_turn=per_turn)
    task = next(t for t in task_set.tasks("train") if t.id == item.task_id)
    pool = Pool(1, 60.0)
    request = Request(task, 0, config.warmstart.seed, 0, 0, ("test",))
    episode = Episode(request, task_set, pool, config.rollout, prompts, form)
    episode.strategy = item.strategy if kind == ACTION else None
    if kind == REFLECTION:  # with one attempt at hand, that is the earlier one
        episode.reflection = Reflection(Attempt(item.turn_strategies, item.feedback), item.success)
    for own, action in zip(item.turn_strategies, item.actions, strict=True):
        episode.wait()
        assert episode.ask(9000) is not None
        reply = form.reply(turn_response(own, action) if per_turn else f"<action>{action}</action>")
        episode.receive(Sampled(tuple(reply), (0.0,) * len(reply), (1.0,) * len(reply), True))
    episode.wait()
    trajectory = episode.trajectory()
    pool.close()
    rows: list[demonstrations.Row] = []
    for seed in range(9):  # a reflection teaches the turns or a strategy of the episode, at random
        seeded = dataclasses.replace(config, warmstart=dataclasses.replace(config.warmstart, seed=seed))
        rows = [r for r in make_rows(seeded, [item], form, 9000) if kind in r.forms]
        if kind != REFLECTION or "<action>" in form.decode(rows[0].ids):
            break
    assert len(trajectory.turns) == len(item.actions)
    expected = trajectory.rows
    if context == "window":
        expected = [row for turn, row in enumerate(expected) if turn not in item.wasted]
    assert len(rows) == len(expected)
    wasted = {i for t in item.wasted for i in range(trajectory.turns[t].start, trajectory.turns[t].stop)}
    for row, tokens in zip(rows, expected, strict=True):
        length = len(tokens.input_ids)
        assert row.ids[:length] == tokens.input_ids.tolist()
        marks = [
            bool(m) and not (context == "conversation" and i in wasted) for i, m in enumerate(tokens.response_mask)
        ]
        assert [form == kind for form in row.forms[: length - 1]] == marks
        rest = row.ids[length:]
        if context == "conversation" and kind == ACTION:
            question = form.next_user(prompts.judgment(trajectory.final_observation, len(item.actions)), form.end_id)
            answer = form.reply(f"<judgment>[{', '.join(str(t + 1) for t in item.wasted)}]</judgment>")
            assert rest == question + answer
            assert row.forms[length - 1 :] == [CONTEXT] * len(question) + [JUDGMENT] * len(answer)
        else:
            assert rest == []


def test_after_a_reflection_only_play_that_fits_is_taught(tmp_path, task_set, form):
    config = config_for(tmp_path, warmstart={"share_reflection": 1.0})
    played, _ = collect(config, task_set)
    misfits = [p for p in played if not p.fits]
    assert misfits
    assert not any(REFLECTION in row.forms for row in make_rows(config, misfits, form, 512))
    assert any(REFLECTION in row.forms for row in make_rows(config, [p for p in played if p.fits], form, 512))


def test_a_row_that_does_not_fit_ends_a_turn_earlier(tmp_path, task_set, form):
    config = config_for(tmp_path)
    played, _ = collect(config, task_set)
    item = max(played, key=lambda p: len(p.actions))
    whole = next(r for r in make_rows(config, [item], form, 512) if ACTION in r.forms)
    limit = len(whole.ids) // 2
    cut = next(r for r in make_rows(config, [item], form, limit) if ACTION in r.forms)
    assert limit - 60 < len(cut.ids) <= limit
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert cut.ids[-1] == form.end_id
    assert JUDGMENT not in cut.forms


def test_window_context_makes_one_row_per_turn_and_judges_outside_the_conversation(tmp_path, task_set, form):
    config = config_for(tmp_path, rollout={"context": "window", "window_turns": 1})
    played, _ = collect(config, task_set)
    item = next(p for p in played if p.wasted and len(p.actions) > 3)
    rows = make_rows(config, [item], form, 512)
    actions = [r for r in rows if ACTION in r.forms]
    assert len(actions) == len(item.actions) - len(item.wasted)
    assert sum(JUDGMENT in r.forms for r in rows) == 1
    last = form.decode(actions[-1].ids)
    assert item.actions[-2] in last  # the turn before is shown
    assert item.observations[0] in last
    assert item.strategy in last


def test_forms_get_their_share_of_the_loss_whatever_their_length(tmp_path, task_set, form):
    config = config_for(tmp_path)
    rows = make_rows(config, collect(config, task_set)[0], form, 512)
    weights, counts = supervised._form_weights(rows, config.warmstart)
    parts = [w * n for w, n in zip(weights, counts, strict=True)]
    assert [round(1.2 * p / sum(parts), 6) for p in parts] == [0.15, 0.45, 0.2, 0.2, 0.15, 0.05]
    without = dataclasses.replace(config.warmstart, share_judgment=0.0)
    assert supervised._form_weights(rows, without)[0][JUDGMENT] == 0.0


def test_groups_hold_every_row_once_a_pass_and_little_padding(tmp_path, task_set, form):
    import random

    config = config_for(tmp_path)
    rows = make_rows(config, collect(config, task_set)[0], form, 512)
    groups, seen = supervised._groups(rows, 1024, random.Random(0)), []
    while len(seen) < len(rows):
        group = next(groups)
        parts = list(supervised._by_length(group, 1024))
        assert sorted(map(id, group)) == sorted(id(row) for part in parts for row in part)
        for part in parts:
            padded = len(part) * max(len(r.ids) for r in part)
            assert padded <= 2 * 1024
            assert padded - sum(len(r.ids) for r in part) <= supervised.PADDING
        seen += group
    assert sorted(map(id, seen)) == sorted(map(id, rows))


def test_played_demonstrations_and_the_model_are_reused_and_a_new_learning_rate_replays_nothing(
    tmp_path, task_set, monkeypatch
):
    config = config_for(tmp_path, warmstart={"epochs": 0.2})
    folder = warmstart.warm_start(config, task_set)
    written = (folder / "model.safetensors").stat().st_mtime_ns

    def broken(*args, **kwargs):
        raise AssertionError("must not be played again")

    monkeypatch.setattr(demonstrations, "play", broken)
    assert warmstart.warm_start(config, task_set) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    slower = config_for(tmp_path, warmstart={"epochs": 0.2, "lr": 1e-3})
    other = warmstart.warm_start(slower, task_set)
    assert other != folder
    names = {p.name for p in (tmp_path / "cache").iterdir()}
    assert len(names) == 3, names  # two models, one file of played demonstrations, no drafts


def test_the_second_of_two_writers_keeps_what_the_first_one_left(tmp_path):
    folder = nano_folder(tmp_path / "start")
    from hsg.config.options import ModelConfig

    model, tokenizer = load_model(ModelConfig(path=str(folder)))
    target = tmp_path / "cache" / "key"
    assert warmstart._save(model, tokenizer, {"who": "first"}, target) == target
    assert warmstart._save(model, tokenizer, {"who": "second"}, target) == target
    assert json.loads((target / "warmstart.json").read_text())["who"] == "first"
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["key"]


@pytest.mark.parametrize(
    ("ended_by", "epochs", "warned"),
    [("warmstart.seconds", 0.1, True), ("warmstart.seconds", 1.0, False), ("plateau", 0.9, False)],
)
def test_a_model_that_the_clock_left_untaught_is_named(tmp_path, ended_by, epochs, warned):
    (tmp_path / "warmstart.json").write_text(json.dumps({"ended_by": ended_by, "epochs": epochs}))
    said = warmstart.warning(tmp_path)
    assert (said is not None) == warned
    assert said is None or (f"had time for {epochs} of a pass" in said and f"delete {tmp_path}," in said)


@pytest.mark.slow
def test_training_lowers_the_validation_loss_and_the_folder_loads(tmp_path, task_set):
    from hsg.config.options import ModelConfig

    # All held-out rows are checked at this size of batch, so that every form is among them.
    config = config_for(tmp_path, warmstart={"num_tasks": 40, "epochs": 8.0, "batch_tokens": 3072})
    folder = warmstart.warm_start(config, task_set)
    record = json.loads((folder / "warmstart.json").read_text())
    assert record["validation_loss"] < 0.5 * record["history"][0]["validation"]
    assert set(record["validation_loss_by_form"]) == set(FORMS)
    assert all(record["rows"].values())
    assert record["tasks"] == 36
    assert record["tasks_held_out"] == 4
    assert record["epochs"] <= 8.2
    model, tokenizer = load_model(ModelConfig(path=str(folder)))
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings
    further = warmstart.continue_training(config, task_set, folder, seconds=1.0)
    control = json.loads((further / "warmstart.json").read_text())
    # A new optimizer at the full learning rate: one second need not improve the plateau, but it must not lose it.
    assert control["validation_loss"] != record["validation_loss"]
    assert control["validation_loss"] < 1.1 * record["validation_loss"]
    assert 0.9 < control["seconds"] < 10
    assert warmstart.continue_training(config, task_set, folder, seconds=1.0) == further


def test_an_expert_alone_is_enough(tmp_path, task_set, monkeypatch, form):
    monkeypatch.setattr(type(task_set), "demonstrations", lambda self, task, seed: [])
    tasks = task_set.tasks("train")
    pairs = expert_demonstrations(task_set, tasks, seed=0)
    assert pairs == expert_demonstrations(task_set, tasks, seed=0)
    assert {t.id for t, shown in pairs if shown.fits} == {t.id for t in tasks}
    assert any(not shown.fits for _, shown in pairs)
    wasted = [(t, shown) for t, shown in pairs if shown.wasted]
    assert wasted
    for task, shown in wasted:
        kept = [a for i, a in enumerate(shown.actions) if i not in shown.wasted]
        assert kept == task_set.expert_actions(task)
    config = config_for(tmp_path, warmstart={"num_tasks": 40})
    played, _ = collect(config, task_set)
    # A turn put in that broke the expert's way is thrown out: every fitting play still ends well.
    assert all(p.success for p in played if p.fits)
    assert any(p.wasted for p in played)
    assert len(played) <= len(pairs)


def test_an_environment_without_experts_is_refused_in_one_line(tmp_path, task_set, monkeypatch):
    monkeypatch.setattr(type(task_set), "demonstrations", lambda self, task, seed: [])
    monkeypatch.setattr(type(task_set), "expert_actions", lambda self, task: None)
    with pytest.raises(ValueError, match=r"environment\.name must have demonstrations for a warm start, got 'toy'"):
        collect(config_for(tmp_path), task_set)


def test_an_engine_that_never_works_is_not_an_environment_without_demonstrations(tmp_path, task_set, monkeypatch):
    def broken(self, task, seed):
        raise EnvironmentFault("Java ended at once")

    monkeypatch.setattr(type(task_set), "create", broken)
    with pytest.raises(RuntimeError, match=r"demonstrations must be played for a warm start, got none: Java ended"):
        collect(config_for(tmp_path, warmstart={"num_tasks": 4}), task_set)
    assert list(tmp_path.iterdir()) == []


def test_what_an_engine_lost_is_played_again(tmp_path, task_set, monkeypatch):
    """One JVM that died must not leave a smaller data set in the cache."""
    whole, _ = collect(config_for(tmp_path / "whole", warmstart={"num_tasks": 4}), task_set)
    create, made = type(task_set).create, []

    def dies_once(self, task, seed):
        made.append(task.id)
        if len(made) == 2:
            raise EnvironmentFault("killed")
        return create(self, task, seed)

    monkeypatch.setattr(type(task_set), "create", dies_once)
    again, _ = collect(config_for(tmp_path / "again", warmstart={"num_tasks": 4}), task_set)
    assert again == whole


def test_asked_to_stop_it_leaves_the_queue(task_set, monkeypatch):
    """Two threads, four tasks with a hundred demonstrations each: what is being played is finished, the rest never begins."""
    begun = []

    def slow(*_):
        begun.append(1)
        if len(begun) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    monkeypatch.setattr(demonstrations, "play", slow)
    monkeypatch.setattr(task_set, "demonstrations", lambda task, seed: [Demonstration("", ())] * 100)
    config = make_config({"rollout": {"env_threads": 2}, "log": {"quiet": True}})
    with stopping.handlers(), pytest.raises(stopping.Stopped):
        play_demonstrations(config, task_set, task_set.tasks("train")[:4])
    assert 4 <= len(begun) < 100


def test_play_stops_when_the_environment_is_done_and_lists_admissible_actions(task_set):
    task = task_set.tasks("train")[0]
    expert = task_set.expert_actions(task)
    shown = Demonstration("s", (*expert, "look", "look"), wasted=(1, len(expert) + 1))
    played = demonstrations.play(task_set, task, shown, seed=0, max_turns=8, list_admissible=True)
    assert played.actions == tuple(expert)
    assert played.success
    assert played.wasted == (1,)
    assert len(played.observations) == len(expert) + 1
    assert expert[0] in played.admissible[0]
    assert len(played.admissible) == len(expert)


def test_the_command_prints_one_line_for_bad_input(capsys):
    assert warmstart.main(["--set", "environment.name=toi"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: environment.name must be one of")
    assert error.count("\n") == 1
