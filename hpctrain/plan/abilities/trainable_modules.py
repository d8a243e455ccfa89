"""What hpctrain cannot train with FSDP and DDP, out of all that can be planned for them.

Belongs here: what holds for every engine that trains Hugging Face's classes. Does not belong here:
which shapes these classes have (see `representable`), DeepSpeed (see `trainable_deepspeed`).
"""

from __future__ import annotations

from hpctrain.plan.abilities.representable import unrepresentable
from hpctrain.spec.run import RunSpec

Found = list[tuple[str, str]]


def untrainable(spec: RunSpec) -> Found:
    """List (dotted path of the field, what the trainer or the classes lack)."""
    engine = spec.engine.name
    found = [*unrepresentable(spec), *_unread(spec)]
    if spec.recompute == "selective":
        words = f"{engine} recomputes whole blocks or nothing: say `full` or `none`"
        found.append(("recompute", words))
    if spec.resources.min_nodes is not None and spec.engine.ddp.hook == "powersgd":
        words = "PowerSGD's memory of past errors belongs to one number of ranks"
        found.append(("engine.ddp.hook", words))
    return found


def _unread(spec: RunSpec) -> Found:
    """List choices that only Megatron has and that would silently do nothing."""
    found: Found = []
    engine, optimizer = spec.engine.name, spec.optimizer
    if spec.engine.implementation != "auto":
        found.append(("engine.implementation", f"{engine} has one implementation: say `auto`"))
    if not optimizer.overlap_grad_reduce and not spec.engine.abilities.chooses_overlap:
        words = f"{engine} always hides the gradient reduction: say `true`"
        found.append(("optimizer.overlap_grad_reduce", words))
    if not optimizer.overlap_param_gather:
        words = f"{engine} decides itself when it gathers weights: say `true`"
        found.append(("optimizer.overlap_param_gather", words))
    return found
