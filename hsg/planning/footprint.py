"""Bytes and arithmetic of one iteration on one rank, from numbers alone.

    held      weights + AdamW's two moments (float32, sharded) + reference + critic      all the time
    rollout   held + whole weights gathered + attention cache + one forward of all rows of a stream
    update    held + gradients (float32, sharded) + layers borrowed + activations of a micro-batch
              + the larger of a chunk of logits and a layer's gradients
    step      held + gradients + AdamW's scratch
    peak      the largest of the three

Activations are what autograd keeps of a packed micro-batch (packing.py), counted per token and layer; each formula says
of what.  `test_plan.py` holds rollout and update to peaks measured on the CPU.  Deliberately absent: memory of the
CUDA context and of a fragmented allocator (plan.py leaves room for both), pipeline and tensor parallelism,
activations of other layers than attention with grouped heads and a gated feed-forward part (experts, state spaces: their
weights are counted, what they keep is taken to be as much), a judge of other weights than the
policy's (`judge.model` as a path), the encoder, the networks of RND.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hsg.config.options import Config, choose_targets
from hsg.crediting.names import ESTIMATOR_NAMES
from hsg.planning.sizes import Architecture

FLOAT = 4  # bytes of a master weight, a gradient, a moment
CHUNK_LOGITS = 2**24
"""As in models.py: logits that exist at once, and the most that are kept for the backward pass."""
HEAD_BYTES = 16  # of a logit: scaled, its log-softmax, the probability, and their product for the entropy
SAMPLE_BYTES = 20  # of a logit while a token is picked: as it comes, its log-softmax and exp, and a float64 sum


@dataclass(frozen=True)
class Setting:
    """Where and how a configuration is run, as far as memory goes.

    half    matrix products in bfloat16 (GPUs, `model.dtype: auto`)         gpus  ranks, one per GPU
    sharded spread by FSDP2 over `shards` ranks, parameters and hidden states then in the compute dtype
    """

    gpus: int
    shards: int
    half: bool

    @property
    def sharded(self) -> bool:
        return self.shards > 1

    @property
    def compute(self) -> int:
        """Bytes of a number in a matrix product."""
        return 2 if self.half else FLOAT

    @property
    def hidden(self) -> int:
        """Bytes of a number in the hidden states between layers: autocast over whole float32 weights keeps them float32."""
        return 2 if self.half and self.sharded else FLOAT


def setting_of(config: Config, gpus: int, *, gpus_per_host: int = 8, device: str = "cuda") -> Setting:
    """`distributed.sharding: auto` is taken for full, as under fsdp.yaml and multinode.yaml."""
    kind = config.distributed.sharding
    shards = {"none": 1, "hybrid": min(gpus, gpus_per_host)}.get(kind, gpus)
    half = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and device == "cuda")
    return Setting(gpus, shards, half)


@dataclass(frozen=True)
class Lengths:
    """What no option says of the texts, in tokens."""

    row: int | None = None  # the longest row; None: the longest that is allowed
    turn: int = 256  # new ones of a row between two responses
    prompt: int = 1024  # before a strategy


@dataclass(frozen=True)
class Rows:
    """How many rows one rank plays, and how long they are."""

    trajectories: int  # of one iteration, on the rank that has the most
    at_once: int  # in the cache together, those of an evaluation too
    length: int  # tokens of the longest
    drawn: int  # tokens of the candidates for strategies that are drawn at once: those of whole tasks

    @property
    def waves(self) -> int:
        return math.ceil(self.trajectories / self.at_once)


def rows_of(config: Config, model: Architecture, gpus: int, lengths: Lengths) -> Rows:
    """As `Rollout` cuts them into portions."""
    num_strategies, num_rollouts = config.group_shape
    tasks = math.ceil(config.num_tasks / gpus)
    members = max(1, gpus // config.num_tasks)  # ranks of the smallest team, where tasks are split (teams.py)
    total = tasks * math.ceil(num_strategies * num_rollouts / members)
    longest = model.context if config.rollout.max_tokens is None else min(model.context, 2 * config.rollout.max_tokens)
    settings = config.evaluation
    tested = min(settings.batch_size, math.ceil((settings.num_tasks or settings.batch_size * gpus) / gpus))
    together = max(total, tested if settings.every or settings.initial or settings.final else 0)
    at_once = min(together, max(1, config.rollout.max_cache_tokens // longest))
    of_task = config.num_candidates * min(model.context, lengths.prompt + config.strategy.max_tokens)
    drawn = of_task * min(tasks, max(1, config.rollout.max_cache_tokens // of_task))
    return Rows(total, at_once, min(longest, lengths.row or longest), drawn if config.strategy.per == "episode" else 0)


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank (the fullest), by purpose; what each is made of stands beside its formula."""

    weights: int
    gradients: int
    moments: int
    reference: int
    critic: int
    gathered: int
    cache: int
    forward: int
    borrowed: int
    activations: int
    flowing: int
    scratch: int

    @property
    def held(self) -> int:
        return self.weights + self.moments + self.reference + self.critic

    @property
    def rollout(self) -> int:
        return self.held + self.gathered + self.cache + self.forward

    @property
    def update(self) -> int:
        return self.held + self.gradients + self.borrowed + self.activations + self.flowing

    @property
    def step(self) -> int:
        return self.held + self.gradients + self.scratch

    @property
    def peak(self) -> int:
        return max(self.rollout, self.update, self.step)

    def items(self) -> list[tuple[str, int]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def lora_parameters(config: Config, model: Architecture) -> int:
    """Numbers in the adapters; 0 without. ValueError where a name in `targets` is that of no layer."""
    lora = config.model.lora
    if not lora.rank:
        return 0
    chosen = choose_targets(model.adapters, lora)
    return lora.rank * sum(model.adapters[name] for name in chosen)


def footprint(
    model: Architecture,
    config: Config,
    setting: Setting,
    lengths: Lengths | None = None,
    *,
    foreach: bool = True,
) -> Footprint:
    """The plan of one rank. `foreach`: AdamW works on all parameters at once, as on GPUs, and not on one after the other."""
    lengths = lengths or Lengths()
    rows = rows_of(config, model, setting.gpus, lengths)
    adapters = lora_parameters(config, model)
    trained = adapters or model.parameters
    on_gpu = 0 if config.distributed.cpu_offload and setting.sharded else 1
    share = FLOAT * on_gpu / setting.shards

    with_reference = config.loss.kl_coef > 0 or (config.judge.enabled and config.judge.model == "reference")
    with_critic = ESTIMATOR_NAMES[config.advantage.estimator]
    body = model.num_layers * model.layer + model.head + model.hidden_size
    # Weights, gradients and two moments of the body and the value head; a vocabulary head of its own is only carried along.
    critic = 4 * FLOAT * (body + model.hidden_size + 1) + (0 if model.tied else FLOAT * model.head)

    largest = max(model.head, model.hidden_size * model.intermediate_size)
    return Footprint(
        weights=round(share * (model.parameters + adapters)),
        gradients=round(share * trained),
        moments=round(2 * share * trained),
        reference=round(share * model.parameters) if with_reference and not adapters else 0,
        critic=critic if with_critic else 0,
        gathered=_gathered(model, config, setting),
        cache=max(rows.at_once * rows.length, rows.drawn) * cache_bytes(model, setting),
        forward=_forward_bytes(model, config, setting, rows, lengths.turn),
        borrowed=_borrowed(model, setting, checkpointing=config.model.gradient_checkpointing, frozen=bool(adapters)),
        activations=_kept(model, config, setting) * microbatch_tokens(config, rows),
        flowing=_flowing(model, config, setting, microbatch_tokens(config, rows), frozen=bool(adapters)),
        # The square root of the second moment, of everything or of one parameter (there with a copy).
        scratch=round(share * trained) if foreach else 2 * FLOAT * largest,
    )


def microbatch_tokens(config: Config, rows: Rows) -> int:
    """Positions of the largest micro-batch: a row that is longer than it may be stands alone."""
    return max(config.update.microbatch_tokens, rows.length)


# ------------------------------------------------------------------------------------------------------------ rollout


def cache_bytes(model: Architecture, setting: Setting) -> int:
    """Keys and values of one position, in the compute dtype."""
    return model.num_layers * model.key_size * 2 * setting.compute


def _gathered(model: Architecture, config: Config, setting: Setting) -> int:
    """Whole weights in the compute dtype: a copy, or gathered; the root and two layers where ranks forward together."""
    if not (setting.sharded or setting.half):
        return 0  # master weights do it
    whole = model.parameters
    if setting.sharded and config.rollout.weights == "sharded":
        whole = model.root + 2 * model.layer
    judged_by_another = config.judge.enabled and config.judge.model == "reference" and not config.model.lora.rank
    return setting.compute * whole * (2 if judged_by_another else 1)


def _forward_bytes(model: Architecture, config: Config, setting: Setting, rows: Rows, turn_tokens: int) -> int:
    """The larger of: all rows of a stream read what came in a turn; they pick one token each."""
    in_stream = math.ceil(rows.at_once / min(config.rollout.streams, rows.at_once))
    tokens = in_stream * min(turn_tokens, rows.length)
    read = tokens * setting.compute * (3 * model.hidden_size + 3 * model.intermediate_size)
    read += (2 + 2 * setting.compute) * tokens * rows.length  # the mask: two booleans and twice what is added to scores
    pick = SAMPLE_BYTES * in_stream * model.vocabulary
    return max(read, pick)


# ------------------------------------------------------------------------------------------------------------- update


def layer_activations(model: Architecture, setting: Setting) -> int:
    """Bytes that autograd keeps of one layer, per token."""
    wide, query, key, inner = model.hidden_size, model.query_size, model.key_size, model.intermediate_size
    c = setting.compute
    if not setting.half:
        norm = 3 * FLOAT * wide  # what comes in, normalised, times the weight
        norms = 2 * norm
    elif not setting.sharded:
        norms = 2 * 2 * FLOAT * wide + 5 * c * wide  # the same, and autocast's copy for each of five projections
    else:
        norms = 2 * (FLOAT + 2 * c) * wide  # a float32 copy of what comes in, and the others in bfloat16
    # q, k, v and the output; once more for the projection behind; a log-sum-exp per head.
    attention = c * (3 * query + 2 * key) + FLOAT * model.num_heads
    if model.qk_norm:
        attention += (FLOAT + c) * (query + key)
    return norms + attention + 4 * c * inner  # gate, silu(gate), up, their product


def _kept(model: Architecture, config: Config, setting: Setting) -> int:
    """Bytes per token from the forward pass to the backward pass: of all layers, or with checkpointing their inputs."""
    last_norm = 2 * setting.hidden * model.hidden_size
    if config.model.gradient_checkpointing:
        return setting.hidden * model.hidden_size * model.num_layers + last_norm
    return layer_activations(model, setting) * model.num_layers + last_norm


def _borrowed(model: Architecture, setting: Setting, *, checkpointing: bool, frozen: bool) -> int:
    """Weights in the compute dtype that the update makes, and gradients on their way to their slices."""
    c = setting.compute
    if not setting.sharded:
        if not setting.half:
            return 0
        # Autocast's copies, until a backward pass has used them. It holds those of trained weights all through the
        # forward pass; of frozen ones only autograd holds any, which with checkpointing knows of one layer.
        layers = 1 if frozen and checkpointing else model.num_layers
        return c * (layers * model.layer_matrices + model.head)
    # The root stays, and so does its gradient; a layer is used while the next one comes.
    weights = c * (model.root + 2 * model.layer)
    if frozen:
        return weights
    during = weights + c * model.root + (c + FLOAT) * model.layer
    at_the_end = (2 * c + FLOAT) * model.root  # its gradients added up in float32, with all activations gone
    return max(during, at_the_end)


def _flowing(model: Architecture, config: Config, setting: Setting, tokens: int, *, frozen: bool) -> int:
    """The larger of two moments: a chunk of logits exists; gradients pass a layer, which checkpointing makes once more."""
    logits = min(tokens * model.vocabulary, max(CHUNK_LOGITS, model.vocabulary))
    states = setting.hidden * model.hidden_size * tokens  # those of the sampled tokens: at most all
    # A matrix product's own gradient, before it is added to those of earlier micro-batches.
    of_head = 0 if frozen or setting.sharded else FLOAT * model.head
    of_layer = 0 if frozen or setting.sharded else FLOAT * model.hidden_size * model.intermediate_size
    at_head = HEAD_BYTES * logits + states + of_head
    # Gradients of silu(gate) and of up; of the hidden state and on its way around.
    per_token = 2 * setting.compute * model.intermediate_size + 2 * setting.hidden * model.hidden_size
    if config.model.gradient_checkpointing:
        per_token += layer_activations(model, setting)
    return max(at_head, per_token * tokens + of_layer)


# --------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Work:
    """FLOPs of the fullest rank in one iteration, and bytes that its decoding has to read; attention's own are left out."""

    rollout_flops: float
    update_flops: float
    decode_bytes: float

    def seconds(self, tflops: float, bandwidth: float) -> tuple[float, float]:
        """(rollout, update) at `tflops` 1e12 FLOPs/s and `bandwidth` 1e12 bytes/s; rows of that length need more."""
        rollout = max(self.rollout_flops / tflops, self.decode_bytes / bandwidth) / 1e12
        return rollout, self.update_flops / tflops / 1e12


def work(model: Architecture, config: Config, setting: Setting, lengths: Lengths | None = None) -> Work:
    """2 FLOPs a weight and token forward, twice that again backward (once, where the weights are frozen).

    Responses are taken to be as long as they may be. What a weight costs is counted where it is multiplied: of an
    embedding that is not the head a token reads one row.
    """
    rows = rows_of(config, model, setting.gpus, lengths or Lengths())
    body, head = 2 * model.num_layers * model.used_matrices, 2 * model.head
    positions = rows.trajectories * rows.length
    per_row = min(rows.length, config.rollout.max_turns * config.rollout.max_action_tokens)
    sampled = rows.trajectories * per_row
    # Decoding steps: each reads all weights, in the compute dtype, and half a cache.
    streams = min(config.rollout.streams, rows.at_once)
    steps = rows.waves * streams * per_row
    extra = 0
    if config.strategy.per == "episode":
        drawn = config.num_candidates * math.ceil(config.num_tasks / setting.gpus) * config.strategy.max_tokens
        positions, sampled, extra = positions + drawn, sampled + drawn, extra + config.strategy.max_tokens
    if config.judge.enabled:
        judged = rows.trajectories * config.judge.max_tokens
        positions, sampled = positions + judged, sampled + judged
        extra += rows.waves * streams * config.judge.max_tokens
    weights = model.num_layers * model.layer + model.head
    read = weights * setting.compute
    held = rows.at_once / streams * rows.length / 2 * cache_bytes(model, setting)
    decode = (steps + extra) * read + steps * held

    trained, scored = rows.trajectories * rows.length, rows.trajectories * per_row
    again = 1 if config.model.gradient_checkpointing else 0
    scorings = int(config.recomputes_logprobs)
    scorings += config.loss.kl_coef > 0  # the reference's
    forward_backward = 2 if config.model.lora.rank else 3
    passes = scorings + config.update.epochs * (forward_backward + again)
    if ESTIMATOR_NAMES[config.advantage.estimator]:
        passes += 1 + config.critic.epochs * (3 + again)
    # More logits than are kept for the backward pass are made twice.
    twice = int(microbatch_tokens(config, rows) * model.vocabulary > CHUNK_LOGITS)
    head_passes = scorings + config.update.epochs * (forward_backward + twice)
    update = body * trained * passes + head * scored * head_passes
    return Work(float(body * positions + head * sampled), float(update), float(decode))
