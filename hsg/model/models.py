"""Load policy, tokenizer and encoder; score what was sampled.

    hidden   = base model(input_ids)                                     (B, T, D)
    logits   = head(hidden at positions that the policy sampled)         (n, V)   n = response_mask.sum()
    logprobs = log_softmax(logits / temperatures)[input_ids[:, t + 1]]   (B, T-1), 0.0 where nothing was sampled

Master weights are float32 and stay so: at a learning rate of 1e-6 a bfloat16 weight does not move.
Deliberately absent:
  1. an attention mask while scoring: rows are right-padded and attention is causal, so no real token ever sees
     padding.  The result is exact, and sdpa may run its causal kernel instead of reading a (B, 1, T, T) mask;
  2. dropout, anywhere: the first ratio of an update must be 1 in training mode too;
  3. sampling settings of the model folder: what is scored is the full softmax, so that must be what is sampled;
  4. quantised training; adapters are added by lora.py.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import importlib.util
import inspect
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hsg.config.options import ModelConfig
from hsg.engine.attention import trunk
from hsg.engine.layout import Layout
from hsg.engine.packing import packed_hidden
from hsg.engine.precision import autocast, head_weight
from hsg.model.composite import hub_class, processor_files, text_part
from hsg.model.folder import require_rows, require_tokenizer_files, require_words, resolve_model, short_names
from hsg.model.sharding import with_weights
from hsg.text.chat import with_template_end
from hsg.types import Batch

transformers.utils.logging.disable_progress_bar()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_KEEP_LOGITS = 2**24
"""Logits of one forward (64 MiB in float32) that are kept for the backward pass rather than computed twice."""
_CHUNK_LOGITS = 2**24
"""Logits that exist at once where they are not kept."""


@contextlib.contextmanager
def restated(path: str | Path, key: str) -> Iterator[None]:
    """Turns what transformers raises while it loads into the house's one line; its progress bars are not shown."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # a stranger's files: tokenizers raises a bare one, a config that is a list TypeError
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= 160 else reason[:157] + "..."
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
        near = difflib.get_close_matches(str(path), short_names(key), n=1)
        remedy = ""
        if near and str(path) not in near:
            remedy = f"; did you mean {near[0]!r}?"
        elif offline and not Path(path).expanduser().is_dir():
            remedy = "; HF_HUB_OFFLINE is set, so only folders and downloaded models can be loaded"
        raise ValueError(
            f"{key} must be a model that transformers can load, got {str(path)!r}: {reason}{remedy}"
        ) from None


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False, key: str = "model.path") -> Any:
    """The tokenizer of a model (see `resolve_model`)."""
    name, extra = resolve_model(path, key=key)
    if "gguf_file" not in extra:
        require_tokenizer_files(name, key=key)
    with restated(path, key):
        extra.pop("use_safetensors", None)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    require_words(name, tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys(), key=key)
    return tokenizer


def read_config(name: str, *, trust_remote_code: bool = False, key: str = "model.path", **options: Any) -> Any:
    """The configuration of transformers behind a folder, a config.json or a hub id."""
    with restated(name, key):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **options)


def require_decoder(config: Any, *, key: str = "model.path") -> None:
    """ValueError for an encoder with a decoder, whose decoder alone transformers would load, with random parts."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{key} must be a causal language model, got {config.model_type}, an encoder with a decoder; use another"
        )


@contextlib.contextmanager
def _load_report(lacking: Sequence[str]) -> Iterator[None]:
    """Holds back transformers' table of weights that did not fit; it is shown where none is `lacking`."""
    logger, held = logging.getLogger("transformers.modeling_utils"), []

    def hold(record: logging.LogRecord) -> bool:
        report = "LOAD REPORT" in record.getMessage() or "checkpoint seem corrupted" in record.getMessage()
        if report:
            held.append(record)
        return not report

    logger.addFilter(hold)
    try:
        yield
    finally:
        logger.removeFilter(hold)
    if not lacking:
        for record in held:
            logger.handle(record)


def load_model(
    model_config: ModelConfig,
    path: str | Path | None = None,
    device: torch.device | str = "cpu",
    *,
    key: str = "model.path",
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer, ready to be scored, sampled from and trained.

    `path` None: `model_config.path`. Weights are float32 (float64 if that is the dtype asked for);
    `model.compute_dtype` is what `autocast(model)` computes in. The model is in eval mode; training mode gives the same
    numbers. Raises a one-line ValueError if the model is not there or cannot be scored.
    """
    path = model_config.path if path is None else path
    name, extra = resolve_model(path, key=key)
    device = torch.device(device)
    dtype = _compute_dtype(model_config.dtype, device)
    remote = model_config.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=remote, key=key)
    of_config = {k: v for k, v in extra.items() if k != "use_safetensors"}
    config = read_config(name, trust_remote_code=remote, key=key, **of_config)
    require_decoder(config, key=key)
    lacking: list[str] = []
    with restated(path, key), _load_report(lacking):
        without_dropout(config)
        whole = hub_class(config)  # of a composite checkpoint; AutoModelForCausalLM would drop its other parts

        def load(attention: str) -> Any:
            model, info = (whole or AutoModelForCausalLM).from_pretrained(
                name,
                config=copy.deepcopy(config),  # a load that fails leaves its marks
                dtype=torch.float64 if dtype == torch.float64 else torch.float32,
                attn_implementation=attention,
                trust_remote_code=remote,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that all are known, and refused below
                **extra,
            )
            lacking[:] = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
            return model

        model = with_attention(load, _attention(model_config.attention, device, dtype))
        _forget_quantisation(model)
        model = text_part(model)
        if whole is not None:
            model.whole.files = processor_files(name)
    if lacking:
        raise ValueError(
            f"{key} must be a model with all its weights, got {str(path)!r} without {len(lacking)} of them of that shape "
            f"({lacking[0]}); they would be random"
        )
    require_rows(
        model.get_input_embeddings().num_embeddings,
        tokenizer.get_vocab(),
        tokenizer.get_added_vocab(),
        f"{tokenizer.chat_template} {tokenizer.eos_token}",
        key=key,
    )
    without_dropout(model)
    model.generation_config = _plain_generation(model, tokenizer)
    model.config.use_cache = False  # generation asks for its cache itself
    if model_config.gradient_checkpointing:
        # The second name is that of transformers 5.20, the last one for Python 3.10.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.compute_dtype = dtype
    model.to(device)
    check_head(model, key=key)
    return model, tokenizer


def _compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


def _attention(name: str, device: torch.device, dtype: torch.dtype) -> str:
    if name != "auto":
        return name
    half_on_gpu = device.type == "cuda" and dtype == torch.bfloat16
    return "flash_attention_2" if half_on_gpu and importlib.util.find_spec("flash_attn") else "sdpa"


def with_attention(load: Callable[[str], Any], name: str) -> Any:
    """`load(name)`; a plainer attention where the model has none of that name, which `find_fit` then says or refuses."""
    plainer = [other for other in ("sdpa", "eager") if other != name] if name != "eager" else []
    try:
        return load(name)
    except (ValueError, ImportError):
        for other in plainer:
            with contextlib.suppress(ValueError):
                return load(other)
        raise


def without_dropout(of: Any) -> None:
    """Dropout and jitter of routers to 0: of a configuration, which layers copy when they are made, or of a model."""
    if isinstance(of, nn.Module):
        for module in of.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return
    for name, value in list(vars(of).items()):
        if isinstance(value, transformers.PretrainedConfig):
            without_dropout(value)
        elif (("drop" in name or "jitter" in name) and isinstance(value, float)) or name == "layerdrop":
            setattr(of, name, 0.0)


def _forget_quantisation(model: Any) -> None:
    """A dequantised model is an ordinary one; its leftovers would make `save_pretrained` refuse."""
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    for name, value in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
        if hasattr(model, name):
            setattr(model, name, value)


def _plain_generation(model: Any, tokenizer: Any) -> GenerationConfig:
    """Ends and padding of the folder's generation config, and nothing of its sampling settings."""
    old = model.generation_config
    pad = next((i for i in (old.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), None)
    stops = list(stop_ids(model, tokenizer))
    # top_k must be said: left out, the library keeps 50 tokens.
    full_softmax = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(bos_token_id=old.bos_token_id, eos_token_id=stops or None, pad_token_id=pad, **full_softmax)


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: all eos ids of the generation config, the tokenizer's, the chat template's own end."""
    declared = model.generation_config.eos_token_id
    ids = list(declared) if isinstance(declared, (list, tuple)) else [declared]
    return with_template_end(tokenizer, [i for i in [*ids, tokenizer.eos_token_id] if i is not None])


_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What Gemma, RecurrentGemma and xLSTM call it."""


def head_logits(model: Any, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
    """Logits of last hidden states, exactly as the model's own forward makes them (`check_head` holds it to that).

    hidden (..., D) -> (..., V) in float32 (float64 for a float64 model). `weight`: that of `precision.head_weight`.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    logits = head(hidden) if weight is None else head(hidden, weight)
    if logits.dtype != torch.float64:
        logits = logits.float()
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scale
    for name in _SOFT_CAPS:
        if cap := getattr(config, name, None):
            logits = cap * torch.tanh(logits / cap)
    return logits


@torch.no_grad()
def check_head(model: Any, *, key: str = "model.path") -> None:
    """Raise ValueError if the model's logits are more than its output head on the base model's last hidden state."""
    name = type(model).__name__
    device = next(model.parameters()).device
    ids = torch.arange(1, 6, device=device)[None] % model.get_input_embeddings().num_embeddings
    was_training = model.training
    model.eval()
    try:
        with autocast(model):
            expected = model(input_ids=ids, use_cache=False).logits
            got = head_logits(model, _hidden(model, ids)) if model.get_output_embeddings() is not None else None
    except Exception as error:  # a stranger's model
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"{key} must be a model that can be run, got {name}: {reason}") from error
    model.train(was_training)
    if not torch.isfinite(expected).all():
        raise ValueError(
            f"{key} must be a model whose logits are numbers, got {name} with nan or inf; look at its weights"
        )
    if got is None or got.shape != expected.shape or not torch.allclose(got, expected.to(got.dtype), 1e-2, 1e-2):
        raise ValueError(f"{key} must be a model whose logits are its output head on the last hidden state, got {name}")


def _hidden(model: Any, input_ids: Tensor) -> Tensor:
    """Last hidden states (B, T, D) of right-padded rows; see the module docstring for the missing attention mask."""
    base = trunk(model)
    extra = {}
    if "position_ids" in inspect.signature(base.forward).parameters:
        # Every row starts at position 0, so the positions are those of the columns.
        extra["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    return base(input_ids=input_ids, use_cache=False, **extra).last_hidden_state


@with_weights
def sampled_hidden(model: Any, batch: Batch, layout: Layout | None = None) -> Tensor:
    """Last hidden states (n, D) that predict the sampled tokens, row after row; `layout` as in `score`."""
    mask = batch.response_mask  # (B, T-1)
    if layout is None:
        return _hidden(model, batch.input_ids)[:, :-1][mask]
    return packed_hidden(model, layout).index_select(0, layout.index[:, :-1][mask])


@with_weights
def score(
    model: Any,
    batch: Batch,
    *,
    layout: Layout | None = None,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the sampled tokens under the model, at the temperature each was sampled at; gradients flow.

    Returns (logprobs, entropy): logprobs (B, T-1) in nats, of input_ids[:, t + 1], 0.0 where `response_mask` is False;
    entropy (B, T-1) in nats of the same distributions, without a gradient, or None. float32 (float64 for a float64
    model). At most `chunk_tokens` rows of logits exist at once; where they are many in all, the backward pass computes
    them again.
    `layout` (of this very batch, inside `packed_attention`): the same numbers from a packed sequence.
    Raises ValueError for rows that are not right-padded.
    """
    mask = batch.response_mask  # (B, T-1)
    padding = batch.attention_mask == 0
    if bool((padding[:, :-1] & ~padding[:, 1:]).any()):
        raise ValueError("attention_mask must be that of right-padded rows, got padding before a real token")
    with autocast(model):
        sampled = sampled_hidden(model, batch, layout)  # (n, D)
        weight = head_weight(model)  # cast once for all chunks, and for their second forward
        targets = batch.input_ids[:, 1:][mask]  # (n,)
        temperatures = batch.temperatures[mask].to(sampled.device)  # (n,)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        chunk_tokens = chunk_tokens or max(1, _CHUNK_LOGITS // vocabulary)
        num_logits = len(targets) * vocabulary
        again = torch.is_grad_enabled() and num_logits > _KEEP_LOGITS
        lean = functools.partial(checkpoint, _chunk, use_reentrant=False, preserve_rng_state=False)
        pieces = []
        for start in range(0, len(targets), chunk_tokens):
            piece = slice(start, start + chunk_tokens)
            arguments = (model, weight, sampled[piece], targets[piece], temperatures[piece], with_entropy)
            pieces.append(lean(*arguments) if again else _chunk(*arguments))
    # Keeps a batch without a sampled token in the graph: every rank must be able to call backward.
    nothing = sampled.flatten()[:0].sum()
    dtype = torch.float64 if sampled.dtype == torch.float64 else torch.float32
    logprobs = _spread(mask, [p[0] for p in pieces], dtype) + nothing.to(dtype)
    return logprobs, _spread(mask, [p[1] for p in pieces], dtype) if with_entropy else None


def _chunk(
    model: Any, weight: Tensor | None, hidden: Tensor, targets: Tensor, temperatures: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """(n, D), (n,), (n,) -> log-probs (n,) and entropies (n,)."""
    logits = head_logits(model, hidden, weight)
    logits = logits / temperatures.to(logits.dtype)[:, None]  # (n, V)
    logs = logits.log_softmax(-1)
    entropy = logs.new_zeros(len(targets))
    if with_entropy:
        # Autocast would round the product's factors to bfloat16: 0.1 nats and more of a model that is sure of itself.
        with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            entropy = -torch.linalg.vecdot(logs.exp(), logs)
    return logs.gather(1, targets[:, None])[:, 0], entropy


def _spread(mask: Tensor, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Values (n,) back to the places (B, T-1) where the mask is True, 0.0 elsewhere."""
    out = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    if pieces:
        out[mask] = torch.cat(list(pieces))
    return out


class Encoder:
    """Texts to unit vectors: the mean of a BERT-like model's last hidden states over real tokens, normalised."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._max_length = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))

    @torch.no_grad()
    def embed(self, texts: Sequence[str], batch_size: int = 64) -> Tensor:
        """(n,) texts -> (n, D) float32 unit vectors on the CPU. A text that occurs twice is encoded once."""
        unique = sorted(dict.fromkeys(texts), key=len)
        vectors: dict[str, Tensor] = {}
        for start in range(0, len(unique), batch_size):
            portion = unique[start : start + batch_size]
            rows = self._tokenizer(
                portion, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt"
            ).to(self._model.device)
            hidden = self._model(**rows).last_hidden_state.float()  # (b, T, D)
            real = rows["attention_mask"][..., None].to(hidden.dtype)  # (b, T, 1)
            mean = (hidden * real).sum(1) / real.sum(1).clamp(min=1)  # (b, D)
            vectors.update(zip(portion, nn.functional.normalize(mean, dim=-1).cpu(), strict=True))
        if not vectors:
            return torch.zeros(0, self._model.config.hidden_size)
        return torch.stack([vectors[text] for text in texts])


def load_encoder(path: str | Path, device: torch.device | str = "cpu") -> Encoder:
    """The encoder of strategies (minilm, a folder or a hub id): its `embed` makes unit vectors (n, D) of n texts."""
    name, extra = resolve_model(path, key="model.encoder")
    tokenizer = load_tokenizer(path, key="model.encoder")
    with restated(path, "model.encoder"):
        model = AutoModel.from_pretrained(name, dtype=torch.float32, **extra)
    return Encoder(model.to(device), tokenizer)
