"""What hpctrain's own trainer can train, out of all that can be planned.

Belongs here: one sentence for each thing that it cannot. Does not belong here: what cannot be
planned at all (`layout`, `sharding`).
"""

from __future__ import annotations

from hpctrain.plan.abilities.readable import unreadable
from hpctrain.plan.abilities.representable import CLASSES, unrepresentable
from hpctrain.plan.abilities.trainable_deepspeed import untrainable_by_deepspeed
from hpctrain.plan.abilities.trainable_megatron_lm import untrainable_by_megatron_lm
from hpctrain.plan.documents import Plan
from hpctrain.spec.run import RunSpec

TRAINED_ENGINES = ("megatron", "megatron-lm", "fsdp", "deepspeed", "ddp")
TRAINED_PRECISIONS = ("bf16", "fp32")
_MODULES = tuple(CLASSES)
TRAINED_FAMILIES = {
    "megatron": ("gpt", "llama", "bert"),
    "megatron-lm": ("gpt", "llama"),
    "fsdp": _MODULES,
    "deepspeed": _MODULES,
    "ddp": _MODULES,
}
_OFFLOADS = {
    "megatron": ("none",),
    "megatron-lm": ("none", "cpu"),
    "fsdp": ("none", "cpu"),
    "deepspeed": ("none", "cpu", "nvme"),
    "ddp": ("none",),
}
# Fields of `parallel` by which each engine splits a model when it trains.
TRAINED_AXES: dict[str, tuple[str, ...]] = {"fsdp": (), "deepspeed": ("tp", "pp"), "ddp": ()}

_LEARNED_FROM_TOKENS = ("language_modeling", "masked_language_modeling")

Found = list[tuple[str, str]]


def untrainable(spec: RunSpec) -> tuple[str, ...]:
    """Why `submit` refuses this spec, the field first; empty when it can be trained."""
    lines = [words for _, words in untrainable_fields(spec)]
    return tuple(f"{words}: this can be planned, but not submitted" for words in lines)


def untrainable_fields(spec: RunSpec) -> Found:
    """(dotted path of the field, what the trainer lacks)."""
    engine = spec.engine.name
    if engine not in TRAINED_ENGINES:
        known = ", ".join(TRAINED_ENGINES[:-1]) + f" and {TRAINED_ENGINES[-1]}"
        return [("engine.name", f"hpctrain trains with {known}, not with {engine}")]
    found = _of_every_engine(spec)
    if engine == "megatron-lm":
        return found + _of_megatron(spec) + untrainable_by_megatron_lm(spec)
    return found + (_of_megatron(spec) if engine == "megatron" else _of_modules(spec))


def untrainable_layout(plan: Plan) -> Found:
    """The same for what the planner has chosen: axes that can be priced, but not trained."""
    if plan.engine not in TRAINED_AXES:
        return []
    chosen = {"tp": plan.layout.tp, "pp": plan.layout.pp, "cp": plan.layout.cp}
    return [
        ("parallel", f"hpctrain trains {plan.engine} without {axis}, the plan has {axis} {size}")
        for axis, size in chosen.items()
        if size > 1 and axis not in TRAINED_AXES[plan.engine]
    ]


def _of_every_engine(spec: RunSpec) -> Found:
    found: Found = []
    engine, family = spec.engine.name, spec.model.family
    families = TRAINED_FAMILIES[engine]
    if family not in families:
        words = f"hpctrain trains {_and(families)} with {engine}, not {family}"
        found.append(("model.family", words))
    if spec.precision not in TRAINED_PRECISIONS:
        found.append(("precision", f"hpctrain trains in bf16 and fp32, not in {spec.precision}"))
    if spec.optimizer.offload not in _OFFLOADS[engine]:
        place = f"the optimizer's state on {spec.optimizer.offload}"
        found.append(("optimizer.offload", f"hpctrain does not train {engine} with {place}"))
    return found + unreadable(spec)


def _of_megatron(spec: RunSpec) -> Found:
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


def _of_modules(spec: RunSpec) -> Found:
    """FSDP and DDP train Hugging Face's classes, which cannot have every shape."""
    engine = spec.engine.name
    found = [*unrepresentable(spec), *_unread(spec)]
    if spec.recompute == "selective":
        words = f"{engine} recomputes whole blocks or nothing: say `full` or `none`"
        found.append(("recompute", words))
    if spec.resources.min_nodes is not None and spec.engine.ddp.hook == "powersgd":
        words = "PowerSGD's memory of past errors belongs to one number of ranks"
        found.append(("engine.ddp.hook", words))
    if engine == "deepspeed":
        found += untrainable_by_deepspeed(spec)
    return found


def _unread(spec: RunSpec) -> Found:
    """Choices that only Megatron has: who makes one elsewhere must hear that it does nothing."""
    found: Found = []
    engine, optimizer = spec.engine.name, spec.optimizer
    if spec.engine.implementation != "auto":
        found.append(("engine.implementation", f"{engine} has one implementation: say `auto`"))
    if not optimizer.overlap_grad_reduce and engine != "deepspeed":
        words = f"{engine} always hides the gradient reduction: say `true`"
        found.append(("optimizer.overlap_grad_reduce", words))
    if not optimizer.overlap_param_gather:
        words = f"{engine} decides itself when it gathers weights: say `true`"
        found.append(("optimizer.overlap_param_gather", words))
    return found


def _and(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
