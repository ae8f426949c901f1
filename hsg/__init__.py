"""hsg: train language-model agents with strategies (StraTA and SGE) in plain PyTorch.

The one public face: `from hsg import Trainer, policy_loss`.  docs/api.md tells every name.  Each is imported when it is asked
for, so `import hsg` costs nothing and only what computes loads torch.  Deliberately absent: names that a room needs of
another one; inside hsg a module is imported by its own path.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# What one does -> module -> names.  None of them is the name of a module beside this file, which its import would put here.
_GROUPS = {
    "Write an environment": {
        "hsg.protocol": "Environment TaskSet Task StepResult Demonstration EnvironmentFault check_environment",
        "hsg": "environments",
    },
    "Configure": {
        "hsg.config.loading": "load_config make_config",
        "hsg.config.options": "Config",
    },
    "Train": {
        "hsg.experiments.run": "train",
        "hsg.experiments.warmstart": "warm_start",
        "hsg.trainer": "Trainer",
        "hsg.run.tracking": "RunFolder",
        "hsg.ranks.distributed": "Distributed",
    },
    "Play": {
        "hsg.run.build": "load_policy training_tasks make_judge",
        "hsg.play.curriculum": "iteration_tasks make_requests",
        "hsg.rollout": "Rollout",
        "hsg.text.prompts": "Prompts parse_judgment",
    },
    "Strategies": {
        "hsg.strategy.propose": "propose select show_strategies",
        "hsg.model.models": "load_encoder",
        "hsg.strategy.selector": "farthest_point_indices",
        "hsg.strategy.reflection": "ReflectionBuffers attempt_of",
    },
    "Credit": {
        "hsg.credit": "assign_credit",
        "hsg.crediting.advantages": "group_advantages top_fraction_mean",
        "hsg.crediting.estimators": "estimator ESTIMATORS Turns Estimate compared where_mixed",
    },
    "Update": {
        "hsg.batch": "build_rows Row collate",
        "hsg.model.models": "score",
        "hsg.losses": "policy_loss",
    },
    "Measure": {
        "hsg.measure.evaluation": "evaluate evaluation_tasks play_samples",
        "hsg.measure.measures": "sample_measures",
        "hsg.measure.pass_at_k": "pass_at_k",
        "hsg.experiments.reading.curves": "read_lines",
        "hsg.planning.architecture": "read_architecture",
    },
    "Records": {
        "hsg.types": "Strategy Turn Trajectory Attempt Batch STRATEGY ACTION",
        "hsg.model.policy": "Policy",
    },
}
_HOMES = {name: home for homes in _GROUPS.values() for home, names in homes.items() for name in names.split()}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:  # the same once more, for editors and mypy; a test compares
    from hsg import environments as environments
    from hsg.batch import Row as Row
    from hsg.batch import build_rows as build_rows
    from hsg.batch import collate as collate
    from hsg.config.loading import load_config as load_config
    from hsg.config.loading import make_config as make_config
    from hsg.config.options import Config as Config
    from hsg.credit import assign_credit as assign_credit
    from hsg.crediting.advantages import group_advantages as group_advantages
    from hsg.crediting.advantages import top_fraction_mean as top_fraction_mean
    from hsg.crediting.estimators import ESTIMATORS as ESTIMATORS
    from hsg.crediting.estimators import Estimate as Estimate
    from hsg.crediting.estimators import Turns as Turns
    from hsg.crediting.estimators import compared as compared
    from hsg.crediting.estimators import estimator as estimator
    from hsg.crediting.estimators import where_mixed as where_mixed
    from hsg.experiments.reading.curves import read_lines as read_lines
    from hsg.experiments.run import train as train
    from hsg.experiments.warmstart import warm_start as warm_start
    from hsg.losses import policy_loss as policy_loss
    from hsg.measure.evaluation import evaluate as evaluate
    from hsg.measure.evaluation import evaluation_tasks as evaluation_tasks
    from hsg.measure.evaluation import play_samples as play_samples
    from hsg.measure.measures import sample_measures as sample_measures
    from hsg.measure.pass_at_k import pass_at_k as pass_at_k
    from hsg.model.models import load_encoder as load_encoder
    from hsg.model.models import score as score
    from hsg.model.policy import Policy as Policy
    from hsg.planning.architecture import read_architecture as read_architecture
    from hsg.play.curriculum import iteration_tasks as iteration_tasks
    from hsg.play.curriculum import make_requests as make_requests
    from hsg.protocol import Demonstration as Demonstration
    from hsg.protocol import Environment as Environment
    from hsg.protocol import EnvironmentFault as EnvironmentFault
    from hsg.protocol import StepResult as StepResult
    from hsg.protocol import Task as Task
    from hsg.protocol import TaskSet as TaskSet
    from hsg.protocol import check_environment as check_environment
    from hsg.ranks.distributed import Distributed as Distributed
    from hsg.rollout import Rollout as Rollout
    from hsg.run.build import load_policy as load_policy
    from hsg.run.build import make_judge as make_judge
    from hsg.run.build import training_tasks as training_tasks
    from hsg.run.tracking import RunFolder as RunFolder
    from hsg.strategy.propose import propose as propose
    from hsg.strategy.propose import select as select
    from hsg.strategy.propose import show_strategies as show_strategies
    from hsg.strategy.reflection import ReflectionBuffers as ReflectionBuffers
    from hsg.strategy.reflection import attempt_of as attempt_of
    from hsg.strategy.selector import farthest_point_indices as farthest_point_indices
    from hsg.text.prompts import Prompts as Prompts
    from hsg.text.prompts import parse_judgment as parse_judgment
    from hsg.trainer import Trainer as Trainer
    from hsg.types import ACTION as ACTION
    from hsg.types import STRATEGY as STRATEGY
    from hsg.types import Attempt as Attempt
    from hsg.types import Batch as Batch
    from hsg.types import Strategy as Strategy
    from hsg.types import Trajectory as Trajectory
    from hsg.types import Turn as Turn
else:  # mypy would take any name of a module with a __getattr__

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _HOMES:
            home = _HOMES[name]
            value = import_module(f"hsg.{name}") if home == "hsg" else getattr(import_module(home), name)
            globals()[name] = value  # the next time nobody asks
            return value
        message = f"module 'hsg' has no attribute {name!r}"
        if not name.startswith("__"):
            import difflib

            near = difflib.get_close_matches(name, _HOMES, n=3)
            message += f"; did you mean {' or '.join(near)}?" if near else "; docs/api.md tells every name"
        raise AttributeError(message)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
