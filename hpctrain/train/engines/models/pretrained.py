"""A model with the weights of a local Hugging Face directory.

Belongs here: loading, and whether everything has come. Does not belong here: whether the directory
is complete and the right model (`hpctrain.train.pretrained_checks`, before torch is imported).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError

from hpctrain.checkpoints.staged import Staged
from hpctrain.errors import InvalidInputError, Problem

# Behind the body: made for a task, and so made anew for another one.
_POOLER = ".pooler."


def load_model(model_class: Any, settings: Any, staged: Staged, *, new_head: bool) -> Any:
    """A module of `model_class` in fp32 with the directory's weights, whatever type they have.

    `new_head`: the last layers, which are for other classes or another task, may be missing; they
    are drawn from the current random state. Raises InvalidInputError for anything else that is
    missing or left over.
    """
    try:
        module, told = model_class.from_pretrained(
            staged.path,
            config=settings,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # they are told, all at once
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", str(staged.path))]) from error
    problems = list(_problems(module, told, new_head=new_head))
    if problems:
        raise InvalidInputError([Problem(words, str(staged.path)) for words in problems])
    return module


def _problems(module: Any, told: dict[str, Any], *, new_head: bool) -> Iterator[str]:
    body = f"{module.base_model_prefix}."
    missing = {*told["missing_keys"], *(one[0] for one in told["mismatched_keys"])}
    if new_head:
        missing = {name for name in missing if name.startswith(body) and _POOLER not in name}
    if missing:
        yield f"the weights {_some(missing)} are missing or of another shape"
    unused = {name for name in told["unexpected_keys"] if name.startswith(body)}
    unused = {name for name in unused if _POOLER not in name}
    if unused:
        yield f"the weights {_some(unused)} belong to no part of {type(module).__name__}"


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
