"""List what hpctrain cannot train with FSDP and DDP although it can be planned.

Belongs here: what holds for every engine that trains Hugging Face's classes. Does not belong here:
which shapes these classes have (see `representable_hugging_face`), DeepSpeed (see
`trainable_deepspeed`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.plan.abilities.representable_hugging_face import unrepresentable
from hpctrain.spec.run import RunSpec


def untrainable(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted path of the field, what the trainer or the classes lack).

    Settings that only Megatron has are refused, because they would silently do nothing.
    """
    engine, optimizer = spec.engine.name, spec.optimizer
    yield from unrepresentable(spec)
    if spec.engine.implementation != "auto":
        yield "engine.implementation", f"{engine} has one implementation: say `auto`"
    if not optimizer.overlap_grad_reduce and not spec.engine.abilities.chooses_overlap:
        message = f"{engine} always hides the gradient reduction: say `true`"
        yield "optimizer.overlap_grad_reduce", message
    if not optimizer.overlap_param_gather:
        message = f"{engine} decides itself when it gathers weights: say `true`"
        yield "optimizer.overlap_param_gather", message
    if spec.recompute == "selective":
        message = f"{engine} recomputes whole blocks or nothing: say `full` or `none`"
        yield "recompute", message
    if spec.resources.min_nodes is not None and spec.engine.ddp.hook == "powersgd":
        message = "PowerSGD's memory of past errors belongs to one number of ranks"
        yield "engine.ddp.hook", message
