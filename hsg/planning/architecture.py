"""The numbers of a model that decide about memory and time, from its config.json: no weights are needed.

    folder or config.json    read as it is
    nano                     the one that `warmstart.nano` asks for
    hub id                   as the hub, or its cache on this machine, has it; without either the few that stand here

Of Qwen2, Qwen3, Llama and Mistral all sizes follow from the file, and nothing heavy is imported; of any other model
transformers is asked, with no weights (counted.py), and refuses what training would refuse with the same line.
"""

from __future__ import annotations

import json
from pathlib import Path

from hsg.config.checks import require
from hsg.config.options import Config
from hsg.model.folder import check_folder, require_config, resolve_model
from hsg.planning.sizes import DENSE, FACTS, Architecture


def read_architecture(config: Config) -> Architecture:
    """The sizes of `model.path`, from its config.json alone. ValueError in one line where it cannot be known here."""
    name = config.model.path
    if name == "nano":
        nano = config.warmstart.nano
        return Architecture(
            nano.num_layers, nano.hidden_size, nano.intermediate_size, nano.num_heads, nano.num_key_value_heads,
            nano.hidden_size // nano.num_heads, nano.vocab_size + nano.num_phrases + len(nano.marks),
            nano.max_position_embeddings, tied=True, qkv_bias=True,
        )  # fmt: skip
    path = Path(name).expanduser()
    if path.is_dir():
        require_config(path, name)
        found = _of_file(path / "config.json", str(path), config)
        if any(
            path.glob("*.safetensors")
        ):  # with weights it is what a run would load, so a tokenizer must be there, too
            check_folder(path, found.vocabulary)
        return found
    if path.is_file():
        return _of_file(path, str(path), config)
    short = name.rsplit("/", 1)[-1].lower()
    if near := [key for key in FACTS if short.startswith(key)]:
        return Architecture.from_config(FACTS[max(near, key=len)], name)
    resolve_model(name)
    from hsg.planning.counted import counted

    return counted(name, config)


def _of_file(path: Path, name: str, config: Config) -> Architecture:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    rule = "a model's config.json, or its folder"
    require(isinstance(found, dict), "model.path", rule, str(path))
    require(isinstance(found.get("text_config") or {}, dict), "model.path", rule, str(path))
    if found.get("model_type") in DENSE and not found.get("text_config"):
        return Architecture.from_config(found, name)
    from hsg.planning.counted import counted

    return counted(name, config)
