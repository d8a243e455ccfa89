"""Spare a rank the import of packages that it does not need.

Packages import others only because they are installed, or for what a run does not do. Each costs
every rank processor time at its start, and a shared file system hundreds of look-ups. Belongs here:
how imports are left out. Does not belong here: which ones an engine can do without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

# Packages that megatron-core imports where they are installed, for logging that no rank does: 450
# modules, which every rank would look for on a shared file system. `hpctrain.tracking` uses them in
# a process of its own.
UNUSED_LOGGERS = ("wandb", "tensorboard")


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Have imports of these packages fail inside the block, unless they are imported already."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent, cast(ModuleType, None)))  # an ImportError each
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def spare_dynamo() -> None:
    """Have torch's optimizers do without torch._dynamo, for ranks that compile nothing.

    Their methods import it to tell it that they are not to be compiled (torch/_compile.py,
    `_disable_dynamo`, which keeps its answer as `__dynamo_disable` of the function), and their
    steps to end what it is compiling (torch/optim/optimizer.py, `_use_grad_for_differentiable`).
    Where that differs in another torch, torch._dynamo is imported as without this.
    """
    import torch  # here: data preparation hides packages, too, and does without torch
    from torch.optim.optimizer import _use_grad_for_differentiable

    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None and _is_from(method, torch._disable_dynamo):
            vars(plain).setdefault("__dynamo_disable", plain)
    for optimizer in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        step = vars(optimizer).get("step")
        if step is not None and _is_from(step, _use_grad_for_differentiable):
            optimizer.step = torch.no_grad()(step.__wrapped__)


def use_deterministic_algorithms(*, compiled: bool) -> None:
    """Have torch use deterministic algorithms only, and raise where it has none.

    torch's own function also imports torch._inductor, a thousand modules, to set its
    `deterministic` (torch/__init__.py). That is for what is `compiled`; where nothing is, only the
    flag of the operations is set.
    """
    import torch

    if compiled:
        torch.use_deterministic_algorithms(True)
    else:
        torch._C._set_deterministic_algorithms(True, warn_only=False)


def _is_from(function: Any, decorator: Callable[..., Any]) -> bool:
    """Return whether `decorator` has made a function."""
    code = getattr(function, "__code__", None)
    return code in decorator.__code__.co_consts
