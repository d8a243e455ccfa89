"""Which constants are fitted, to what they are tied, and what is believed before seeing data.

Belongs here: the list of free constants with bounds and priors, and the constants that are set by
hand with their reason. Does not belong here: the fitting (`calibrate_planner`).

Few constants are free: kernels' shares belong to a GPU, overlap and overheads to a family of
software; releases of one framework share what the release does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

GPUS = {
    # key of calibration.yaml: key whose constants it shares
    "volta": "volta",
    "ampere": "ampere",
    "ada": "ampere",
    "hopper": "hopper",
    "blackwell": "blackwell",
    "GB200": "gb200",
    "GB300": "gb300",
    "B300-SXM": "b300",
    "cdna2": "cdna",
    "cdna3": "cdna",
}

GIB = 2**30


@dataclass(frozen=True)
class Family:
    """One entry of `software`: its description, the era whose overlaps it shares, fixed values."""

    description: str
    era: str
    fixed: dict[str, float]


UNFUSED = dict(flash=0.0, flash_speed=1.0)
FLASH = dict(flash=1.0, flash_speed=1.0)

# Fitted to which of 410 configurations of Aleph Alpha ran out of memory (bench/fit_memory.py):
# eager kernels keep the logits in several types, checkpoints keep more than a layer's input.
SCALING_MEMORY = dict(
    gradient_bytes=2.0,
    main_bytes=12.0,
    checkpoint_copies=2.85,
    logit_bytes=20.5,
    slack=1.29,
    context_bytes=4.3 * GIB,
)
# Fitted to nvidia-smi of 51 BLOOM trials (bench/fit_memory.py): fp32 gradients of the partition
# besides Adam's state, reduction buckets, CUDA context and NCCL.
DEEPSPEED_MEMORY = dict(
    gradient_bytes=2.76,
    main_bytes=16.8,
    checkpoint_copies=1.23,
    logit_bytes=5.1,
    slack=1.05,
    context_bytes=3.7 * GIB,
)

SOFTWARE = {
    "megatron-2021": Family(
        "Megatron-LM 2021 (SC21): fp16, unfused attention, no sequence parallelism",
        "m21",
        dict(UNFUSED, scatter_gather=1, gradient_bytes=2, main_bytes=16),
    ),
    "megatron-2022": Family(
        "Megatron-LM 2022 (sequence parallelism, selective recomputation)",
        "m21",
        dict(UNFUSED, scatter_gather=1, gradient_bytes=4, main_bytes=12),
    ),
    "megatron-2023": Family(
        "Megatron-LM 2023 forks with pipeline schedules of their own",
        "m23",
        dict(UNFUSED, scatter_gather=0, gradient_bytes=4, main_bytes=12),
    ),
    "megatron-deepspeed": Family(
        "Megatron-DeepSpeed 2022 (BLOOM): ZeRO-1 with pipeline",
        "mds",
        dict(UNFUSED, scatter_gather=0, **DEEPSPEED_MEMORY),
    ),
    "deepspeed-zero3-2021": Family(
        "DeepSpeed ZeRO-3 of 2021, no model parallelism",
        "z3",
        dict(UNFUSED, scatter_gather=0, gradient_bytes=2, main_bytes=16),
    ),
    "scaling": Family(
        "Aleph Alpha Scaling 2023: eager PyTorch, fused norms",
        "scaling",
        dict(FLASH, scatter_gather=0, **SCALING_MEMORY),
    ),
    "scaling-unfused-norms": Family(
        "Aleph Alpha Scaling 2023 without its fused norm kernel",
        "scaling",
        dict(FLASH, scatter_gather=0, **{**SCALING_MEMORY, "norm_bytes": 8.2}),
    ),
    "llm-foundry": Family(
        "MosaicML llm-foundry 2023: PyTorch FSDP, Triton flash attention",
        "foundry",
        dict(flash=1.0, scatter_gather=0, gradient_bytes=4, main_bytes=12),
    ),
    "fsdp": Family(
        "PyTorch FSDP2 with fused attention kernels",
        "foundry",
        dict(FLASH, scatter_gather=0, gradient_bytes=4, main_bytes=12),
    ),
    "mcore-plain": Family(
        "Megatron-core and TransformerEngine without overlap of communication",
        "plain",
        dict(FLASH, scatter_gather=0, gradient_bytes=4, main_bytes=12),
    ),
    "mcore": Family(
        "Megatron-core 2024 with overlap of all communication",
        "mcore",
        dict(FLASH, scatter_gather=0, gradient_bytes=2, main_bytes=12, fused_loss=1),
    ),
    "nemo": Family(
        "NeMo 2024-25 on Megatron-core",
        "nemo",
        dict(FLASH, scatter_gather=0, gradient_bytes=2, main_bytes=12, fused_loss=1),
    ),
} | {
    f"bridge-{release}": Family(
        f"Megatron-Bridge container {release}",
        "bridge",
        dict(FLASH, scatter_gather=0, gradient_bytes=2, main_bytes=12, fused_loss=1),
    )
    for release in ("25.09", "25.11", "26.02", "26.04", "26.06", "26.08")
}

# Software that nobody has measured: the median of these, field by field.
GENERIC = "generic"
GENERIC_FROM = ("scaling", "llm-foundry", "mcore-plain", "mcore", "nemo")

ATTENTION = {
    "flash1": dict(flash=1.0),
    "flash2": dict(flash=1.0, flash_speed=1.0, softmax_passes=6.0),
    "fused": dict(flash=0.0, flash_speed=1.0),
    "torch": dict(flash=0.0, flash_speed=1.0),
}


@dataclass(frozen=True)
class Free:
    """One free constant: where it starts, its bounds, how firmly the start is believed.

    `weight` is the reciprocal of the believed relative error. `targets` are (section, key, field).
    """

    name: str
    start: float
    low: float
    high: float
    weight: float
    targets: tuple[tuple[str, str, str], ...]


def free_constants() -> list[Free]:
    """All free constants."""
    return [*_gpu_constants(), *_kernel_constants(), *_software_constants()]


def _gpu_constants() -> list[Free]:
    found: list[Free] = []
    starts = {"ampere": 0.84, "hopper": 0.74, "blackwell": 0.68, "gb200": 0.68, "gb300": 0.72}
    starts |= {"b300": 0.70}
    for group, start in starts.items():
        found.append(_gpu(group, "product_efficiency", start, 0.4, 0.95, 3))
    for group in ("hopper", "blackwell", "gb200", "gb300", "b300"):
        found.append(_gpu(group, "fp8_efficiency", 0.6, 0.2, 0.9, 2))
    for group in ("gb300", "b300", "blackwell"):
        found.append(_gpu(group, "fp4_efficiency", 0.35, 0.1, 0.9, 2))
    flash = {"ampere": (0.52, 0.62), "hopper": (0.45, 0.65), "blackwell": (0.5, 0.7)}
    for group, (start, most) in flash.items():
        also = ("gb200", "gb300", "b300") if group == "blackwell" else ()
        found.append(_gpu((group, *also), "flash_efficiency", start, 0.2, most, 5))
    every = ("ampere", "hopper", "blackwell", "gb200", "gb300", "b300")
    found.append(_gpu(every, "memory_efficiency", 0.85, 0.5, 0.95, 8))
    found.append(_gpu("ampere", "nvlink_efficiency", 0.7, 0.3, 0.95, 4))
    found.append(_gpu(every[1:], "nvlink_efficiency", 0.7, 0.3, 0.95, 4))
    found.append(_gpu("ampere", "tail_products", 1.2e6, 0, 8e6, 1))
    found.append(_gpu("hopper", "tail_products", 1.6e6, 0, 1.2e7, 1))
    found.append(_gpu(every[2:], "tail_products", 2.5e6, 0, 2e7, 1))
    found.append(_gpu("ampere", "batched_efficiency", 0.3, 0.05, 0.8, 2))
    found.append(_gpu(every[1:], "batched_efficiency", 0.25, 0.05, 0.6, 3))
    found.append(_gpu(every[1:], "scan_efficiency", 0.05, 0.005, 0.5, 1))
    found.append(_gpu("ampere", "misaligned_cost", 5.0, 1, 20, 1))
    return found


def _gpu(group: str | tuple[str, ...], field: str, *numbers: float) -> Free:
    groups = (group,) if isinstance(group, str) else group
    keys = tuple(key for key, shared in GPUS.items() if shared in groups)
    targets = tuple(("gpus", key, field) for key in keys)
    return Free(f"{'+'.join(groups)}.{field}", *numbers, targets=targets)


def _kernel_constants() -> list[Free]:
    passes = tuple(
        ("software", key, "softmax_passes") for key in SOFTWARE if not SOFTWARE[key].fixed["flash"]
    )
    return [
        Free("flash1.speed", 0.75, 0.3, 1.0, 3, (("attention", "flash1", "flash_speed"),)),
        Free("fused.passes", 6, 2, 14, 2, (("attention", "fused", "softmax_passes"), *passes)),
        Free("torch.passes", 12, 4, 30, 2, (("attention", "torch", "softmax_passes"),)),
        Free("foundry.flash", 0.7, 0.2, 1.2, 2, (("software", "llm-foundry", "flash_speed"),)),
    ]


# era: start of (streaming, tp_overlap, dp_overlap, pp_overlap, ms per layer, s per step, network)
ERAS = {
    "m21": (1.4, 0.1, 0.2, 0.1, 1e-4, 0.05, 0.6),
    "m23": (1.6, 0.1, 0.2, 0.1, 1e-4, 0.05, 0.6),
    "mds": (1.6, 0.1, 0.2, 0.1, 4e-4, 0.1, 0.4),
    "z3": (1.6, 0.1, 0.3, 0.1, 4e-4, 0.1, 0.15),
    "scaling": (1.4, 0.1, 0.3, 0.1, 4e-4, 0.1, 0.3),
    "foundry": (1.6, 0.1, 0.6, 0.1, 3e-4, 0.03, 0.7),
    "plain": (1.2, 0.1, 0.1, 0.1, 1e-4, 0.03, 0.7),
    "mcore": (1.2, 0.7, 0.9, 0.4, 3e-5, 0.02, 0.7),
    "nemo": (1.2, 0.7, 0.9, 0.4, 3e-5, 0.03, 0.7),
    "bridge": (1.2, 0.7, 0.8, 0.4, 3e-5, 0.05, 0.7),
}


def _software_constants() -> list[Free]:
    found = []
    for era, (streaming, tensor, data, pipeline, layer, step, network) in ERAS.items():
        keys = [key for key, family in SOFTWARE.items() if family.era == era]
        fused = [key for key in keys if not key.endswith("unfused-norms")]
        found += [
            _soft(era, fused, "streaming", streaming, 0.8, 4.0, 3),
            _soft(era, keys, "tp_overlap", tensor, 0.0, 0.95, 2),
            _soft(era, keys, "dp_overlap", data, 0.0, 1.0, 2),
            _soft(era, keys, "pp_overlap", pipeline, 0.0, 0.95, 2),
            _soft(era, keys, "layer_overhead", layer, 0.0, 3e-3, 0.6),
            _soft(era, keys, "step_overhead", min(step, 0.03), 0.0, 0.08, 1.0),
            _soft(era, keys, "straggling", 0.006, 0.0, 0.02, 1.5),
            _soft(era, keys, "network_efficiency", network, 0.05, 0.95, 2),
        ]
    unfused = ["scaling-unfused-norms"]
    found.append(_soft("unfused-norms", unfused, "streaming", 3.0, 1.0, 6.0, 2))
    return found + _expert_constants()


def _expert_constants() -> list[Free]:
    """Launch of experts by release, dispatch by dispatcher, CUDA graphs by scope."""
    found = [_soft("plain", ["mcore-plain"], "expert_overhead", 5e-4, 0, 5e-3, 0.8)]
    for group in (("25.09",), ("25.11",), ("26.02",), ("26.04",), ("26.06", "26.08")):
        keys = [f"bridge-{release}" for release in group]
        found.append(_soft(group[0], keys, "expert_overhead", 5e-4, 0, 5e-3, 0.8))
    starts = {"alltoall": 0.1, "allgather": 0.1, "deepep": 0.4, "hybridep": 0.5}
    for dispatcher, start in starts.items():
        target = ("dispatch", dispatcher, "overlap")
        found.append(Free(f"{dispatcher}.overlap", start, 0.0, 0.95, 2, (target,)))
    for scope, start in (("layer", 0.5), ("full", 0.2)):
        found.append(Free(f"graphs.{scope}", start, 0.0, 1.0, 1, (("graphs", scope, "factor"),)))
    return found


def _soft(era: str, keys: list[str], field: str, *numbers: float) -> Free:
    return Free(f"{era}.{field}", *numbers, targets=tuple(("software", k, field) for k in keys))
