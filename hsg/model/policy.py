"""A model as rollouts know it: it acts, judges and proposes strategies.  Deliberately absent: its loading (models.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hsg.text.chat import ChatFormat


@dataclass
class Policy:
    """What a rollout needs of a model: the weights, the chat format of its tokenizer, how long a row may be."""

    model: Any
    tokenizer: Any
    chat: ChatFormat
    context_limit: int
    is_reference: bool = False  # the model without its adapters, where it has any
