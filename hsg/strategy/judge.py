"""Critical self-judgment (StraTA 2605.06642): which turns both ignored the strategy and did not advance the task?

Asked once per trajectory after the rollout.  Its tokens are context for nobody: never trained, never rewarded.
In conversation context with `judge.model: self` the question is appended to the conversation itself, on the cache the
rollout leaves behind; any other judge reads the turns rewritten as one prompt.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from hsg.config.options import JudgeConfig
from hsg.engine.generation import Cost, Decoder
from hsg.engine.seeds import make_generator
from hsg.model.fit import fit_of
from hsg.model.lora import adapters_off
from hsg.play.episode import Episode, results
from hsg.text.chat import ChatFormat
from hsg.text.prompts import Prompts, parse_judgment
from hsg.types import Judgment


class Judge:
    """Asks the question and reads the answer. `model` and `chat` are the policy's own for `judge.model: self`."""

    def __init__(
        self,
        config: JudgeConfig,
        prompts: Prompts,
        model: Any,
        chat: ChatFormat,
        *,
        context_limit: int,
        on_cache: bool,
        without_adapters: bool = False,
    ) -> None:
        self.config, self.prompts, self.model, self.chat = config, prompts, model, chat
        self.context_limit, self.on_cache = context_limit, on_cache
        self._plain = functools.partial(adapters_off, model) if without_adapters else contextlib.nullcontext

    def judge(
        self, episodes: Sequence[Episode], cost: Cost, decoder: Decoder | None = None, rows: Sequence[int] = ()
    ) -> list[Judgment]:
        """One judgment per episode. With `on_cache`, row `rows[i]` of `decoder` holds the conversation of episode i."""
        judgments = [Judgment(None, skipped=True)] * len(episodes)
        asked: list[int] = []
        questions: list[list[int]] = []
        for i, episode in enumerate(episodes):
            assert episode.conversation is not None and episode.turns, "only an episode that was played can be judged"
            if self.on_cache:
                text = self.prompts.judgment(episode.observation, len(episode.turns))
                question = self.chat.next_user(text, episode.conversation.last)
                length = episode.conversation.end + len(question)
            else:
                first = episode.first_observation or ""
                question = self.chat.prompt(self.prompts.judgment_alone(first, episode.strategy, results(episode)))
                length = len(question)
            if length + self.config.max_tokens <= self.context_limit:  # else nothing is flagged, a metric counts it
                asked.append(i)
                questions.append(question)
        if not asked:
            return judgments
        with self._plain():
            if self.on_cache:
                assert decoder is not None, "a judge that goes on from the conversation needs the decoder that holds it"
                decoder.cost = cost
                where = [rows[i] for i in asked]
                for row, question in zip(where, questions, strict=True):
                    decoder.append(row, question)
            else:
                decoder = Decoder(self.model, self.chat.stop_ids, questions, cost=cost, **fit_of(self.model).decoding)
                where = list(range(len(questions)))
            answers = decoder.sample(
                where,
                temperatures=[self.config.temperature] * len(asked),
                generators=[make_generator(*episodes[i].request.key, "judgment") for i in asked],
                max_new_tokens=[self.config.max_tokens] * len(asked),
            )
        for i, answer in zip(asked, answers, strict=True):
            text = self.chat.decode(answer.ids)
            flagged = parse_judgment(text, len(episodes[i].turns), thinking=self.chat.thinking)
            judgments[i] = Judgment(text, flagged or (), parsed=flagged is not None)
        return judgments
