"""Checkpoints of more than a language model (images, sound): the text part is trained, all else is carried along unchanged.

    whole    Gemma3ForConditionalGeneration    the class that the folder's config.json names, on the CPU
      ├─ vision tower, projector               carried: no gradient, no memory of a GPU
      ├─ language model ──┐
      └─ head ────────────┴─> text   Gemma3ForCausalLM   the same modules under a causal language model's name

The text part is an ordinary causal language model with a config of its own (`text_config`), so whatever scores, samples,
packs, adapts or shards models knows nothing of the rest.  Its checkpoint is the whole again: `Whole.save`.
Deliberately absent: images in a prompt, training of what is carried.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import cached_file

PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "image_processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""What turns images into a model's input; of the hub's folder, to stand beside the whole's weights again."""


def hub_class(config: Any) -> Any | None:
    """The class of a composite checkpoint that its config.json names; None: it is no composite, or names no such class."""
    if config.get_text_config() is config:
        return None
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    return next((cls for cls in named if getattr(cls, "config_class", None) is type(config)), None)


class Whole:
    """A composite model and where its text part's modules stand in it."""

    def __init__(self, model: Any, text: Any, files: dict[str, bytes]) -> None:
        self.model, self.files = model, files
        places = {id(module): name for name, module in model.named_modules()}
        # (name in the text part, name in the whole), outer modules first: what is inside of them is under both names too.
        shared = [(name, places[id(module)]) for name, module in text.named_modules() if id(module) in places]
        self.prefixes: list[tuple[str, str]] = []
        for inner, outer in shared:
            if not any(_under(inner, known) for known, _ in self.prefixes):
                self.prefixes.append((inner, outer))
        rest = (name for name, _ in model.named_parameters())
        self.carried = frozenset(name for name in rest if not any(_under(name, outer) for _, outer in self.prefixes))
        for name, parameter in model.named_parameters():
            if name in self.carried:
                parameter.requires_grad_(False)

    def __deepcopy__(self, memo: Any) -> Whole:
        return self  # what is carried never changes

    def save(self, folder: Path, text: Any, weights: dict[str, Tensor] | None = None) -> None:
        """A folder like the one this was loaded from. `weights`: whole tensors of the text part, where its own are not."""
        weights = text.state_dict() if weights is None else weights
        state = {self._named(name): value for name, value in weights.items()}
        own = self.model.state_dict()
        state |= {name: value for name, value in own.items() if not any(_under(name, p) for _, p in self.prefixes)}
        self.model.generation_config = text.generation_config
        self.model.save_pretrained(folder, state_dict=state)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)

    def _named(self, name: str) -> str:
        inner, outer = next(pair for pair in self.prefixes if _under(name, pair[0]))
        return ".".join(part for part in (outer, name[len(inner) :].strip(".")) if part)


def _under(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def text_part(model: Any) -> Any:
    """The causal language model inside a composite one (its `whole`: a `Whole`); any other model as it is.

    ValueError where it says something else of a text than the whole does.
    """
    if model.config.get_text_config() is model.config:
        return model
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if head is None or not isinstance(decoder, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} has no text part that predicts tokens")
    if any(module is head for module in decoder.modules()):  # Llama 4 holds a whole causal language model
        text = decoder
    else:
        known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(decoder.config), None)
        text = _dressed(known, decoder, head) if known else None
        text = TextPart(decoder, head) if text is None else text
        _check_same(model, text)
    text.generation_config = model.generation_config
    text.whole = Whole(model, text, {})
    return text.eval()


def _dressed(cls: Any, decoder: Any, head: nn.Module) -> Any | None:
    """A causal language model of class `cls` around these modules; None where its own are of other classes."""
    with torch.device("meta"):
        text = cls(decoder.config)
    prefix = cls.base_model_prefix
    if type(getattr(text, prefix, None)) is not type(decoder):
        return None
    setattr(text, prefix, decoder)
    text.set_output_embeddings(head)
    still = [name for name, value in (*text.named_parameters(), *text.named_buffers()) if value.is_meta]
    return None if still else text


class TextPart(PreTrainedModel, GenerationMixin):
    """A language model and its head, where transformers has no causal language model of that name (Qwen2.5-VL)."""

    config_class = transformers.PretrainedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = (
        True  # asked of the decoder; nothing attends here
    )

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def __init__(self, decoder: Any, head: nn.Module) -> None:
        super().__init__(decoder.config)
        self.model, self.lm_head = decoder, head
        self._no_split_modules = decoder._no_split_modules

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """logits (B, T or what is kept, V)."""
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **options,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep])
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


@torch.no_grad()
def _check_same(model: Any, text: Any) -> None:
    device = next(text.parameters()).device
    ids = torch.arange(1, 6, device=device)[None] % text.get_input_embeddings().num_embeddings
    expected, got = (m.eval()(input_ids=ids, use_cache=False).logits for m in (model, text))
    if not torch.allclose(got, expected, rtol=1e-3, atol=1e-3):
        raise ValueError(f"the text part of {type(model).__name__} gives other logits than the whole")


def processor_files(name: str) -> dict[str, bytes]:
    """The files of a folder or hub id that prepare a composite model's images, by name; those that are there."""
    found = {}
    for file in PROCESSOR_FILES:
        path = cached_file(
            name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )  # fmt: skip
        if path is not None:
            found[file] = Path(path).read_bytes()
    return found
