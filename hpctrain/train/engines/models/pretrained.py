"""Load a model with the weights of a local Hugging Face directory.

Belongs here: loading, and checking that all weights were loaded. Does not belong here: whether the
directory is complete and the right model (`hpctrain.train.pretrained_checks`, before torch is
imported).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import Staged

# Behind the body: made for a task, and so new for another one.
_POOLER = ".pooler."


def load_model(model_class: Any, settings: Any, staged: Staged, *, new_head: bool) -> Any:
    """Return a module of `model_class` in fp32 with the directory's weights, of any stored type.

    `new_head`: the last layers, which are for other classes or another task, may be missing; they
    are drawn from the current random state. Raises InvalidInputError for any other weight that is
    missing or unused.
    """
    try:
        module, report = model_class.from_pretrained(
            staged.path,
            config=settings,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # the report lists all of them
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", str(staged.path))]) from error
    body = f"{module.base_model_prefix}."
    missing = {*report["missing_keys"], *(names[0] for names in report["mismatched_keys"])}
    if new_head:
        missing = {name for name in missing if name.startswith(body) and _POOLER not in name}
    unused = {name for name in report["unexpected_keys"] if name.startswith(body)}
    unused = {name for name in unused if _POOLER not in name}
    reasons = []
    if missing:
        reasons.append(f"the weights {_some(missing)} are missing or of another shape")
    if unused:
        reasons.append(f"the weights {_some(unused)} belong to no part of {type(module).__name__}")
    if reasons:
        raise InvalidInputError([Problem(reason, str(staged.path)) for reason in reasons])
    return module


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
