"""Soft prompts on disk: one safetensors file whose header holds the template and the privacy record.

The file is small (20 tokens of width 576 are 46 kB) and safe to read: it holds numbers and JSON, no code. `as_peft`
writes the same vectors in the format of PEFT's prompt tuning.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrine import files
from terrine.errors import InvalidArgument
from terrine.prompts.template import Template

if TYPE_CHECKING:
    from terrine.prompts.soft import SoftPrompt

_FORMAT = "terrine soft prompt 1"


def save(prompt: SoftPrompt, path: Path) -> None:
    """Write the prompt: an interrupted save leaves what was there."""
    from safetensors.torch import save as as_bytes

    header = {
        "format": _FORMAT,
        "template": json.dumps(dataclasses.asdict(prompt.template)),
        "privacy": json.dumps(prompt.privacy),
        "model": prompt.model_name,
        "scale": json.dumps(prompt.scale),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: one.detach().cpu().contiguous() for name, one in prompt.state_dict().items()}
    files.write(path, as_bytes(tensors, header), private=False)


def load(path: Path) -> dict[str, Any]:
    """What a prompt is made of again."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InvalidArgument(f"{path}: no such file; want a prompt that SoftPrompt.save wrote")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InvalidArgument(f"{path}: not a safetensors file ({error}); want a prompt") from None
    if header.get("format") != _FORMAT:
        raise InvalidArgument(f"{path}: not a soft prompt of this version of Terrine; want one that it saved")
    template = Template(**json.loads(header["template"]))
    return {
        "tokens": values["tokens"],
        "template": template,
        "weight": values.get("weight"),
        "bias": values["bias"],
        "centre": values.get("centre"),
        "scale": json.loads(header["scale"]),
        "privacy": json.loads(header["privacy"]),
        "model": header["model"],
    }


def as_peft(prompt: SoftPrompt, folder: Path) -> Path:
    """A PEFT prompt-tuning adapter."""
    from safetensors.torch import save as as_bytes

    if prompt.weight is not None:
        raise InvalidArgument("a prompt with a trained output layer: PEFT's prompt tuning has none; want head=False")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "num_virtual_tokens": prompt.count,
        "token_dim": int(prompt.tokens.shape[1]),
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
    }
    files.write(folder / "adapter_config.json", json.dumps(config, indent=2) + "\n", private=False)
    files.write(folder / "privacy.json", json.dumps(prompt.privacy, indent=2) + "\n", private=False)
    tensors = {"prompt_embeddings": prompt.tokens.detach().cpu().contiguous()}
    files.write(folder / "adapter_model.safetensors", as_bytes(tensors), private=False)
    return folder
