"""The names of the ways to credit actions: known without torch, so that a wrong one is refused at once."""

from __future__ import annotations

ESTIMATOR_NAMES: dict[str, bool] = {"group": False, "rloo": False, "reinforce++": False, "gigpo": False, "gae": True}
"""Name -> whether it reads `Turns.values`, and a run with it trains a critic.

Here stand those of estimators.py; `@estimator` adds what others write.
"""
