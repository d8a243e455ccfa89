"""What hpctrain's own trainer can train, out of all that can be planned.

Belongs here: one sentence for each thing that it cannot. Does not belong here: what cannot be
planned at all (`layout`, `sharding`).
"""

from __future__ import annotations

from hpctrain.spec.run import RunSpec

TRAINED_PRECISIONS = ("bf16", "fp32")
TRAINED_FAMILIES = ("gpt", "llama")


def untrainable(spec: RunSpec) -> tuple[str, ...]:
    """Why `submit` refuses this spec, the field first; empty when it can be trained."""
    lines = [words for _, words in untrainable_fields(spec)]
    return tuple(f"{words}: this can be planned, but not submitted" for words in lines)


def untrainable_fields(spec: RunSpec) -> list[tuple[str, str]]:
    """(dotted path of the field, what the trainer lacks)."""
    found: list[tuple[str, str]] = []
    optimizer, family = spec.optimizer, spec.model.family
    if spec.engine.name != "megatron":
        found.append(("engine.name", f"hpctrain trains with megatron, not with {spec.engine.name}"))
    if family not in TRAINED_FAMILIES:
        found.append(("model.family", f"hpctrain trains gpt and llama, not {family}"))
    if spec.precision not in TRAINED_PRECISIONS:
        found.append(("precision", f"hpctrain trains in bf16 and fp32, not in {spec.precision}"))
    if optimizer.offload != "none":
        place = f"the optimizer's state on {optimizer.offload}"
        found.append(("optimizer.offload", f"hpctrain does not train with {place}"))
    if spec.engine.name == "megatron" and optimizer.zero is not None:
        wanted = optimizer.zero > 0
        if wanted != optimizer.distributed:
            word = "true" if wanted else "false"
            found.append(("optimizer.zero", f"hpctrain reads `optimizer.distributed`: say {word}"))
    if spec.model.mla is not None and spec.engine.implementation == "local":
        words = "latent attention needs TransformerEngine, megatron-core's own layers cannot do it"
        found.append(("engine.implementation", words))
    return found
