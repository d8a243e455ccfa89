"""Hugging Face directories: reading one tensor after the other, and writing a whole model.

Belongs here: safetensors and the small files beside them. Does not belong here: which tensor is
what (see `mapping`), whether the directory is complete (`hpctrain.checkpoints.staged`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hpctrain.checkpoints.staged import Staged, weight_files
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.train.engines.models.transformers_library import hide_optional_packages

# Files that go along with weights, whatever form these have.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "LICENSE*",
)
# Bodies that were saved without the head have names without this (AutoModel.save_pretrained).
_BODIES = ("transformer.", "model.")


@contextmanager
def open_tensors(staged: Staged) -> Iterator[Callable[[str], Any]]:
    """A function from a name to its tensor. Raises InvalidInputError for one that is missing."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(staged.path):
            opened = stack.enter_context(_opened(path))
            files.update(dict.fromkeys(opened.keys(), opened))
        yield lambda name: _tensor(files, name, staged.path)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", str(path))]) from error


def _tensor(files: dict[str, Any], name: str, path: Path) -> Any:
    for known in (name, *(name.removeprefix(body) for body in _BODIES)):
        if known in files:
            return files[known].get_tensor(known)
    raise InvalidInputError([Problem(f"has no weight {name}", str(path))])


def dtype_of(staged: Staged) -> torch.dtype:
    """bf16 where all weights are; fp32, which holds any of them, everywhere else."""
    found = set()
    for path in weight_files(staged.path):
        with _opened(path) as opened:
            found |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return torch.bfloat16 if found == {"BF16"} else torch.float32


def write_model(module: Any, target: Path) -> None:
    """config.json and safetensors of at most 5 GB each."""
    with hide_optional_packages():
        module.save_pretrained(target, max_shard_size="5GB")


def copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, license and settings, but nothing that is there already."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
