"""What hpctrain cannot train on megatron-core, out of all that can be planned for it.

Belongs here: one sentence for each, with its field. Does not belong here: what holds for any engine
(see `trainable`).
"""

from __future__ import annotations

from hpctrain.spec.run import RunSpec

_LEARNED_FROM_TOKENS = ("language_modeling", "masked_language_modeling")

Found = list[tuple[str, str]]


def untrainable(spec: RunSpec) -> Found:
    """List (dotted path of the field, what the trainer lacks)."""
    found: Found = []
    optimizer = spec.optimizer
    if optimizer.zero is not None:
        wanted = optimizer.zero > 0
        if wanted != optimizer.distributed:
            word = "true" if wanted else "false"
            found.append(("optimizer.zero", f"hpctrain reads `optimizer.distributed`: say {word}"))
    if spec.model.mla is not None and spec.engine.implementation == "local":
        words = "latent attention needs TransformerEngine, megatron-core's own layers cannot do it"
        found.append(("engine.implementation", words))
    learned = spec.model.classes is None and spec.learned_task in _LEARNED_FROM_TOKENS
    for field, given in (("lora", spec.lora), ("task", None if learned else spec.learned_task)):
        if given is not None:
            words = f"{spec.engine.name} trains whole models from tokens: no `{field}`"
            found.append((field, words))
    if spec.model.family == "bert":
        found += _of_megatrons_bert(spec)
    return found


def _of_megatrons_bert(spec: RunSpec) -> Found:
    found: Found = []
    if spec.model.pretrained is not None:
        found.append(("model.pretrained", "hpctrain converts no BERT to megatron-core"))
    if spec.parallel != "auto" and spec.parallel.cp > 1:
        words = "megatron-core's BERT has no context parallelism: say 1"
        found.append(("parallel.cp", words))
    return found
