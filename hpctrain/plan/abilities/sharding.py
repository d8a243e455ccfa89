"""What an engine has: which axes, which ZeRO stages, what it can put into host memory.

Belongs here: differences between engines as rules with a source. Does not belong here: rules about
layouts (`mesh.rules`), or which engines hpctrain trains (`trainable`).
"""

from __future__ import annotations

from hpctrain.plan.divisors import or_list
from hpctrain.plan.documents import Engine, Offload
from hpctrain.spec.run import RunSpec

AXES: dict[Engine, tuple[str, ...]] = {
    "megatron": ("tp", "pp", "vpp", "cp", "ep"),
    "megatron-lm": ("tp", "pp", "vpp", "cp", "ep"),
    "fsdp": ("tp", "cp"),  # 2-D meshes of torch.distributed: FSDP2 with DTensor, context parallel
    "deepspeed": ("tp", "pp"),  # deepspeed.pipe.PipelineModule, and its `mpu` for tensors
    "ddp": (),
}
STAGES: dict[Engine, tuple[int, ...]] = {
    "megatron": (0, 1),  # without and with the distributed optimizer
    "megatron-lm": (0, 1),
    "fsdp": (2, 3),  # reshard_after_forward off and on (torch.distributed.fsdp.fully_shard)
    "deepspeed": (0, 1, 2, 3),
    "ddp": (0,),
}
# `offload_optimizer.device` of DeepSpeed's configuration: cpu with stages 1-3, nvme with stage 3
OFFLOADS: dict[Engine, tuple[Offload, ...]] = {
    "megatron": ("none", "cpu"),  # OptimizerConfig.optimizer_cpu_offload
    "megatron-lm": ("none", "cpu"),  # --optimizer-cpu-offload
    "fsdp": ("none", "cpu"),  # CPUOffloadPolicy
    "deepspeed": ("none", "cpu", "nvme"),
    "ddp": ("none",),
}


def sharding_problems(spec: RunSpec) -> list[str]:
    """What the spec asks of sharding and offload that the engine cannot do.

    What DeepSpeed's settings exclude among themselves was found with the spec (`spec.deepspeed`).
    """
    return [
        *_stage_problems(spec),
        *_offload_problems(spec),
        *_shard_problems(spec),
    ]


def _stage_problems(spec: RunSpec) -> list[str]:
    engine, zero = spec.engine.name, spec.optimizer.zero
    if zero is None:
        return []
    if zero not in STAGES[engine]:
        others = [name for name, stages in STAGES.items() if zero in stages]
        return [
            f"engine {engine} has no ZeRO stage {zero}: set `optimizer.zero` to "
            f"{or_list(STAGES[engine])}, or `engine.name` to {' or '.join(others)}"
        ]
    written = "distributed" in spec.optimizer.model_fields_set
    if written and spec.optimizer.distributed != (zero > 0):
        word = "true" if spec.optimizer.distributed else "false"
        return [f"optimizer.zero {zero} contradicts `distributed: {word}`: remove one of them"]
    return []


def _offload_problems(spec: RunSpec) -> list[str]:
    engine, offload = spec.engine.name, spec.optimizer.offload
    if offload not in OFFLOADS[engine]:
        return [f"engine {engine} has no `optimizer.offload: {offload}`"]
    return []


def _shard_problems(spec: RunSpec) -> list[str]:
    shard_gpus, engine = spec.optimizer.shard_gpus, spec.engine.name
    if shard_gpus is None or engine == "fsdp":
        return []
    return [f"optimizer.shard_gpus is for engine fsdp (HSDP), not for {engine}"]


def zero_choices(spec: RunSpec) -> tuple[int, ...]:
    """ZeRO stages that a search may use: what the spec says, all of the engine with `auto`."""
    optimizer, engine = spec.optimizer, spec.engine.name
    if optimizer.zero is not None:
        return (optimizer.zero,)
    if engine == "ddp":
        return (0,)
    if engine == "fsdp":
        return (2, 3) if spec.parallel == "auto" else (3,)
    if not optimizer.distributed:
        return (0,)
    if optimizer.offload == "nvme" or spec.engine.deepspeed.offload_parameters != "none":
        return (3,)
    return (1, 2, 3) if engine == "deepspeed" and spec.parallel == "auto" else (1,)


def offload_choices(spec: RunSpec) -> tuple[int, ...]:
    """1: as `optimizer.offload` says. With `parallel: auto` that is an offer, else an order."""
    if spec.optimizer.offload == "none":
        return (0,)
    return (0, 1) if spec.parallel == "auto" else (1,)


def shard_choices(spec: RunSpec, domain: int) -> tuple[int, ...]:
    """GPUs to shard over, 0 for all: FSDP over all or over one NVLink domain (HSDP)."""
    if spec.optimizer.shard_gpus is not None:
        return (spec.optimizer.shard_gpus,)
    free = spec.engine.name == "fsdp" and spec.parallel == "auto"
    return (0, domain) if free and 1 < domain < spec.resources.gpus else (0,)
