"""List what hpctrain cannot train on megatron-core although it can be planned.

Belongs here: one message for each, with its field. Does not belong here: what holds for any engine
(see `trainable`).
"""

from __future__ import annotations

from hpctrain.spec.run import RunSpec

_LEARNED_FROM_TOKENS = ("language_modeling", "masked_language_modeling")

Problems = list[tuple[str, str]]


def untrainable(spec: RunSpec) -> Problems:
    """List (dotted path of the field, what the trainer lacks)."""
    problems: Problems = []
    optimizer = spec.optimizer
    if optimizer.zero is not None:
        wanted = optimizer.zero > 0
        if wanted != optimizer.distributed:
            required = "true" if wanted else "false"
            problems.append(
                ("optimizer.zero", f"hpctrain reads `optimizer.distributed`: say {required}")
            )
    if spec.model.mla is not None and spec.engine.implementation == "local":
        message = (
            "latent attention needs TransformerEngine, megatron-core's own layers cannot do it"
        )
        problems.append(("engine.implementation", message))
    learned = spec.model.classes is None and spec.learned_task in _LEARNED_FROM_TOKENS
    for field, given in (("lora", spec.lora), ("task", None if learned else spec.learned_task)):
        if given is not None:
            message = f"{spec.engine.name} trains whole models from tokens: no `{field}`"
            problems.append((field, message))
    if spec.model.family == "bert" and spec.model.pretrained is not None:
        problems.append(("model.pretrained", "hpctrain converts no BERT to megatron-core"))
    if spec.model.family == "bert" and spec.parallel != "auto" and spec.parallel.cp > 1:
        message = "megatron-core's BERT has no context parallelism: say 1"
        problems.append(("parallel.cp", message))
    return problems
