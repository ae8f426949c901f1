"""Diverse strategy rollout (StraTA 2605.06642): draw C candidates per task, keep the N that lie farthest apart.

    first observations (P)  ->  candidates (P, C), one batched call  ->  embeddings (P, C, D)  ->  kept (P, N)

A candidate whose tags do not parse is kept only when fewer than N of its task's candidates parse; then its whole response
is the strategy, and it pays the format penalty.  Candidates that are not kept never enter the loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from hsg.config.options import Config
from hsg.engine.generation import Cost, Decoder
from hsg.engine.seeds import derive_seed, make_generator
from hsg.model.fit import fit_of
from hsg.model.policy import Policy
from hsg.play.episode import Episode, reflected
from hsg.strategy.selector import farthest_point_indices, mean_pairwise_distance
from hsg.text.chat import Conversation
from hsg.text.prompts import Prompts, parse_strategy
from hsg.types import Candidates, Reflection, Strategy

Embed = Callable[[Sequence[str]], Tensor]  # texts -> (n, D)


def propose(
    config: Config,
    policy: Policy,
    prompts: Prompts,
    observations: Sequence[str],
    keys: Sequence[tuple[object, ...]],
    *,
    num_candidates: int,
    temperature: float,
    cost: Cost | None = None,
    reflections: Sequence[Reflection | None] | None = None,
) -> list[list[Strategy]]:
    """`num_candidates` strategies for each first observation, each sampled with a generator of its own.

    observations and keys (P,) -> strategies (P, C); a key decides the random numbers of its task
    reflections  the earlier attempt that each prompt shows, the same for all its candidates; None: plain prompts
    """
    shown = reflections if reflections is not None else [None] * len(observations)
    texts = [
        prompts.strategy(text, "" if earlier is None else reflected(prompts, earlier))
        for text, earlier in zip(observations, shown, strict=True)
    ]
    asked = [policy.chat.prompt(text) for text in texts]
    rooms = [min(config.strategy.max_tokens, policy.context_limit - len(ids)) for ids in asked]
    if min(rooms) < 1:
        raise ValueError(
            f"the strategy prompt must leave room in the context of {policy.context_limit} tokens, "
            f"got one of {max(map(len, asked))} tokens; use a model with a longer context"
        )
    # Tasks whose candidates the cache holds together; the others come after them.
    longest = max(len(ids) + room for ids, room in zip(asked, rooms, strict=True))
    fitting = max(1, config.rollout.max_cache_tokens // (num_candidates * longest))
    strategies: list[list[Strategy]] = [[] for _ in asked]
    for begin in range(0, len(asked), fitting):
        portion = range(begin, min(begin + fitting, len(asked)))
        repeated = [(i, c) for i in portion for c in range(num_candidates)]
        decoder = Decoder(
            policy.model,
            policy.chat.stop_ids,
            [asked[i] for i, _ in repeated],
            shared=[i for i, _ in repeated],
            cost=cost,
            **fit_of(policy.model, config).decoding,
        )
        responses = decoder.sample(
            list(range(len(repeated))),
            temperatures=[temperature] * len(repeated),
            generators=[make_generator(*keys[i], "strategy", c) for i, c in repeated],
            max_new_tokens=[rooms[i] for i, _ in repeated],
        )
        for (i, _), response in zip(repeated, responses, strict=True):
            row = Conversation(asked[i])
            row.append_response(response.ids, response.logprobs, response.temperatures)
            text = policy.chat.decode(response.ids)
            parsed = parse_strategy(text, thinking=policy.chat.thinking)
            strategies[i].append(
                Strategy(
                    text if parsed is None else parsed,
                    parsed is not None,
                    not response.closed,
                    row.tokens(),
                    config.strategy.max_tokens,
                    prompt=texts[i],
                    reflection=shown[i],
                )
            )
    return strategies


def show_strategies(config: Config, candidates: Sequence[Candidates], episodes: Sequence[Episode]) -> None:
    """Give each episode its strategy, candidates (P) to as many episodes each; `strategy.dropout` of them get none (RLAD).

    Who gets none depends on the episode's key alone, so on neither ranks nor order.
    """
    for i, episode in enumerate(episodes):
        draw = random.Random(derive_seed(*episode.request.key, "dropout")).random()
        kept = candidates[i * len(candidates) // len(episodes)].kept
        shown = draw >= config.strategy.dropout
        episode.strategy = kept[episode.request.strategy_index].text if shown else None


def select(config: Config, strategies: Sequence[Strategy], embed: Embed, key: tuple[object, ...]) -> Candidates:
    """Keep N of one task's candidates by farthest point over those that parse, in selection order.

    strategies (C,); embed: texts -> vectors (C, D); key: decides the numbers of `selector.start: random`
    """
    wanted = config.num_strategies
    vectors = embed([s.text for s in strategies])  # (C, D)
    parsed = [i for i, s in enumerate(strategies) if s.parsed]
    unparsed = [i for i, s in enumerate(strategies) if not s.parsed]
    seed = derive_seed(*key, "selector")
    selected: list[int] = []
    if parsed:
        count = min(wanted, len(parsed))
        picked = farthest_point_indices(vectors[parsed], count, start=config.selector.start, seed=seed)
        selected = [parsed[i] for i in picked.tolist()]
    selected += unparsed[: wanted - len(selected)]
    return Candidates(
        tuple(strategies),
        tuple(selected),
        distance_before=float(mean_pairwise_distance(vectors)) if len(strategies) > 1 else 0.0,
        distance_after=float(mean_pairwise_distance(vectors[selected])) if wanted > 1 else 0.0,
    )
