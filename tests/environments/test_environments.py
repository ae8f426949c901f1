"""Environments that stand outside of the package, named by the dotted path of their module."""

from __future__ import annotations

import sys

import pytest

from hsg import environments
from hsg.experiments.run import _is_ours
from hsg.protocol import Task

MODULE = """
from hsg.protocol import TaskSet
class Mine(TaskSet):
    name, splits = "mine", ("train",)
    def tasks(self, split):
        return [self.task]
    def create(self, task, seed):
        raise AssertionError("not played here")
def make_task_set(word: str = "a"):
    from hsg.protocol import Task
    made = Mine()
    made.task = Task(word, "train")
    return made
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder on Python's path with a package `somelab` in it."""
    package = tmp_path / "somelab"
    package.mkdir()
    (package / "mine.py").write_text(MODULE)
    (package / "empty.py").write_text("")
    (package / "broken.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "somelab"]:
        del sys.modules[name]


def test_module_elsewhere_is_made_with_its_options(lab):
    assert environments.make("somelab.mine").tasks("train") == [Task("a", "train")]
    assert environments.make("somelab.mine", word="b").tasks("train") == [Task("b", "train")]
    assert environments.module_of("somelab.mine") == "somelab.mine"  # an analysis of its runs asks
    assert environments.module_of("toy") == "hsg.environments.toy"


@pytest.mark.parametrize(("name", "said"), [
    ("somelab.nine", "got 'somelab.nine': No module named 'somelab.nine'"),
    ("otherlab.mine", "got 'otherlab.mine': No module named 'otherlab'"),
    ("somelab.empty", "which has none"),
    (".mine", "got '.mine'"),
])  # fmt: skip
def test_what_is_no_environment_is_refused_in_a_line(lab, name, said):
    with pytest.raises(ValueError, match="^environment.name must be a module with make_task_set") as refused:
        environments.make(name)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_options_are_checked_there_too(lab):
    with pytest.raises(ValueError, match="did you mean 'word'"):
        environments.make("somelab.mine", wort="b")
    with pytest.raises(ValueError, match="must be a text"):
        environments.make("somelab.mine", word=3)


def test_fault_further_in_keeps_its_traceback(lab):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        environments.make("somelab.broken")


def test_name_without_a_dot_is_one_of_ours(lab):
    with pytest.raises(ValueError, match="did you mean 'toy'"):
        environments.make("toi")


@pytest.mark.parametrize(("text", "said"), [
    ("def make_task_set():\n  raise ValueError('size must be > 0, got 0')", "somelab.odd: size must be > 0, got 0"),
    ("def make_task_set():\n  return None", "make_task_set of somelab.odd must return a TaskSet, got None"),
    ("def make_task_set(size: int):\n  return None", "somelab.odd.size must be given"),
    ("def make_task_set(*, size: int):\n  return None", "somelab.odd.size must be given"),
])  # fmt: skip
def test_a_module_that_refuses_or_makes_nothing_is_one_line(lab, text, said):
    """As run.py tells a user's fault from a bug: raised by this project, not by a stranger's module."""
    (lab / "odd.py").write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        environments.make("somelab.odd")
    assert _is_ours(refused.value)


def test_module_of_is_the_module_itself_elsewhere():
    assert environments.module_of("toy") == "hsg.environments.toy"
    assert environments.module_of("somelab.mine") == "somelab.mine"
