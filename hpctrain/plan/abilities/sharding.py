"""Check sharding and offload of a spec against the abilities of its engine.

Belongs here: messages about that, and the values that a search may try. Does not belong here: what
each engine has (see `hpctrain.spec.engines`), rules about layouts (`mesh.rules`), what hpctrain
trains (`trainable`).
"""

from __future__ import annotations

from hpctrain.base.errors import Refusal
from hpctrain.plan.divisors import or_list
from hpctrain.spec.engines.registry import ENGINES
from hpctrain.spec.run import RunSpec


def sharding_problems(spec: RunSpec) -> list[Refusal]:
    """List the sharding and offload of the spec that the engine does not have.

    Settings that exclude each other are errors of the spec (`hpctrain.spec.engines`).
    """
    engine, optimizer, abilities = spec.engine.name, spec.optimizer, spec.engine.abilities
    zero, stages, problems = optimizer.zero, abilities.zero_stages, []
    if zero is not None and zero not in stages:
        others = [name for name, other in ENGINES.items() if zero in other.zero_stages]
        message = (
            f"engine {engine} has no ZeRO stage {zero}: set `optimizer.zero` to "
            f"{or_list(stages)}, or `engine.name` to {' or '.join(others)}"
        )
        problems.append(Refusal(message, "optimizer.zero"))
    if optimizer.kind not in abilities.optimizers:
        others = [name for name, other in ENGINES.items() if optimizer.kind in other.optimizers]
        message = (
            f"engine {engine} has no `optimizer.kind: {optimizer.kind}`: set `engine.name` to "
        )
        problems.append(Refusal(message + " or ".join(others), "optimizer.kind"))
    elif optimizer.kind == "muon":
        problems += _problems_of_muon(spec)
    if optimizer.offload not in abilities.offloads:
        message = f"engine {engine} has no `optimizer.offload: {optimizer.offload}`"
        problems.append(Refusal(message, "optimizer.offload"))
    if optimizer.shard_gpus is not None and not abilities.shards_over_part:
        able = " or ".join(name for name, other in ENGINES.items() if other.shards_over_part)
        message = f"optimizer.shard_gpus is for engine {able} (HSDP), not for {engine}"
        problems.append(Refusal(message, "optimizer.shard_gpus"))
    return problems


def _problems_of_muon(spec: RunSpec) -> list[Refusal]:
    """List what excludes Muon: weights that are no matrices, and a state in shards.

    torch.optim.Muon takes two dimensions, and experts of one layer have three. What Megatron-LM
    shards of it depends on its version (core_v0.16: `dist_muon`; main line: `muon` with the
    distributed optimizer).
    """
    given = {
        "lora": spec.lora is not None and "it trains adapters, whose matrices are thin",
        "model.moe": spec.model.moe is not None and "experts are not counted with it",
        "model.family": spec.model.family == "resnet" and "a resnet has convolutions",
        "optimizer.zero": spec.optimizer.zero and "its state is not sharded: say 0",
        "optimizer.offload": spec.optimizer.offload != "none" and "its state stays on the GPU",
    }
    return [
        Refusal(f"`optimizer.kind: muon` is for matrices of layers: {why}", field)
        for field, why in given.items()
        if why
    ]


def zero_choices(spec: RunSpec) -> tuple[int, ...]:
    """List the ZeRO stages of a search: the spec's, or with `auto` all that shard something."""
    optimizer, stages = spec.optimizer, spec.engine.abilities.zero_stages
    if optimizer.zero is not None:
        return (optimizer.zero,)
    if stages == (0,) or optimizer.kind == "muon":
        return (0,)
    if 0 in stages and (
        optimizer.offload == "nvme" or spec.engine.deepspeed.offload_parameters != "none"
    ):
        return (3,)
    sharding = tuple(stage for stage in stages if stage > 0)
    if spec.parallel == "auto":
        return sharding
    return (1,) if 1 in sharding else (max(sharding),)


def offload_choices(spec: RunSpec) -> tuple[int, ...]:
    """List what a search tries: 1 offloads, which `parallel: auto` may do and others must."""
    if spec.optimizer.offload == "none":
        return (0,)
    return (0, 1) if spec.parallel == "auto" else (1,)


def shard_choices(spec: RunSpec, domain: int) -> tuple[int, ...]:
    """List GPUs to shard over, 0 for all: FSDP over all or over one NVLink domain (HSDP)."""
    if spec.optimizer.shard_gpus is not None:
        return (spec.optimizer.shard_gpus,)
    free = spec.engine.abilities.shards_over_part and spec.parallel == "auto"
    return (0, domain) if free and 1 < domain < spec.resources.gpus else (0,)
