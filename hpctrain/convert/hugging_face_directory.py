"""Read single tensors from a Hugging Face directory, and write a whole model as one.

Belongs here: safetensors and the small files beside them. Does not belong here: the meaning of
tensors (see `pretrained_weights`), whether the directory is complete
(`hpctrain.checkpoints.staged`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import Staged, weight_files
from hpctrain.train.engines.models.transformers_library import hide_optional_packages

# Files that accompany weights in any format.
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
# Prefixes that are missing in models saved without a head (AutoModel.save_pretrained).
_BODY_PREFIXES = ("transformer.", "model.")


@contextmanager
def open_tensors(staged: Staged) -> Iterator[Callable[[str], Any]]:
    """Yield a function from a name to its tensor, which raises InvalidInputError if missing."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(staged.path):
            opened = stack.enter_context(_open(path))
            files.update(dict.fromkeys(opened.keys(), opened))

        def read(name: str) -> Any:
            for known in (name, *(name.removeprefix(prefix) for prefix in _BODY_PREFIXES)):
                if known in files:
                    return files[known].get_tensor(known)
            raise InvalidInputError([Problem(f"has no weight {name}", str(staged.path))])

        yield read


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", str(path))]) from error


def dtype_of(staged: Staged) -> torch.dtype:
    """Return bf16 if all weights are bf16, else fp32, which can represent any of them."""
    dtypes = set()
    for path in weight_files(staged.path):
        with _open(path) as opened:
            dtypes |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return torch.bfloat16 if dtypes == {"BF16"} else torch.float32


def write_model(module: Any, target: Path) -> None:
    """Write config.json and safetensors files of at most 5 GB each."""
    with hide_optional_packages():
        module.save_pretrained(target, max_shard_size="5GB")


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, license and settings; existing files are kept."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
