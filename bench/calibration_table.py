"""Which constants are fitted, to what they are tied, and what is believed before seeing data.

Belongs here: the list of free constants with bounds and priors, and the constants that are set by
hand with their reason. Does not belong here: the fitting (`calibrate_planner`).

Few constants are free, and each is physical: kernels' shares belong to a generation of GPUs, what
messages reach and how ranks differ to a fabric, what is hidden and how fast kernels are launched to
one of four kinds of software. What a run switches on is a fact of its row, not a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.plan.cost.from_spec import FRAGMENTED

GPUS = {
    # key of calibration.yaml: key whose constants it shares
    "volta": "volta",
    "ampere": "ampere",
    "ada": "ampere",
    "hopper": "hopper",
    "blackwell": "blackwell",
    "B300-SXM": "ultra",
    "GB200": "blackwell",
    "GB300": "ultra",
    "cdna2": "cdna",
    "cdna3": "cdna",
}

GIB = 2**30


@dataclass(frozen=True)
class Family:
    """One entry of `software`: its description, whose constants it shares, fixed values."""

    description: str
    kind: str
    fixed: dict[str, float]


UNFUSED = dict(flash=0.0, flash_speed=1.0)
FLASH = dict(flash=1.0, flash_speed=1.0)

# Software before PyTorch 2.1, and before CUDA 11.7 (hpctrain.plan.cost.from_spec, `CONTEXT_BYTES`).
OLD = dict(slack=FRAGMENTED, context_bytes=1.3 * GIB)
# Per logit in the eager loss of PyTorch: 16 bits, log-probabilities, their gradient and that of the
# logits in fp32 (torch.nn.functional.cross_entropy on `logits.float()`).
EAGER_LOGITS = 2.0 + 3 * 4.0
SCALING = dict(gradient_bytes=2.0, main_bytes=12.0, logit_bytes=EAGER_LOGITS, **OLD)
# of an eager RMSNorm: x / rms(x) in fp32 (hpctrain.plan.cost.from_spec)
UNFUSED_NORM_BYTES = 4.0
# Fitted to nvidia-smi of 51 BLOOM trials (bench/fit_memory.py): 2, the block in which they are
# summed, and blocks that stay unused. A block of 5e8 elements, DeepSpeed's default, with 2.4 for
# the rest has a median of 3.2 % instead of 2.9 % on the calibration rows. Adam's state is 12 bytes;
# copies of gradients for it are in bench/memory_facts.py.
DEEPSPEED_GRADIENTS = 2.6

# Megatron-LM since its release of 2022; SC21's and DeepSpeed's fork of 2021 wait for them.
BESIDE = dict(beside_weights=1.0)

SOFTWARE = {
    "megatron-2021": Family(
        "Megatron-LM 2021 (SC21): fp16, unfused attention, no sequence parallelism",
        "legacy",
        dict(UNFUSED, scatter_gather=1, gradient_bytes=2, main_bytes=16, **OLD),
    ),
    "megatron-2022": Family(
        "Megatron's layers without TransformerEngine: Megatron-LM 2022, `implementation: local`",
        "legacy",
        dict(UNFUSED, scatter_gather=1, gradient_bytes=4, main_bytes=12, **BESIDE, **OLD),
    ),
    "megatron-2023": Family(
        "Megatron-LM 2023 forks with pipeline schedules of their own",
        "legacy",
        dict(
            UNFUSED,
            scatter_gather=0,
            gradient_bytes=4,
            main_bytes=12,
            slack=FRAGMENTED,
            **BESIDE,
        ),
    ),
    "megatron-deepspeed": Family(
        "Megatron-DeepSpeed 2022 (BLOOM): ZeRO-1 with pipeline",
        "legacy",  # with the fused kernels of Megatron-LM and Apex
        dict(UNFUSED, scatter_gather=0, gradient_bytes=DEEPSPEED_GRADIENTS, main_bytes=12, **OLD),
    ),
    "scaling": Family(
        "Aleph Alpha Scaling 2023: eager PyTorch, fused norms",
        "eager",
        dict(FLASH, scatter_gather=0, **SCALING),
    ),
    "scaling-unfused-norms": Family(
        "Aleph Alpha Scaling 2023 without its fused norm kernel",
        "eager",
        dict(FLASH, scatter_gather=0, norm_bytes=UNFUSED_NORM_BYTES, **SCALING),
    ),
    "deepspeed-zero3-2021": Family(
        "DeepSpeed ZeRO-3 of 2021, which gathered parameters one by one",
        "fsdp",
        dict(UNFUSED, scatter_gather=0, gradient_bytes=2, main_bytes=16, dp_overlap=0.6, **OLD),
    ),
    "deepspeed": Family(
        "DeepSpeed ZeRO, no model parallelism",
        "fsdp",
        dict(FLASH, scatter_gather=0, gradient_bytes=2, main_bytes=16, dp_overlap=0.6),
    ),
    "fsdp": Family(
        "PyTorch FSDP and DDP with fused attention kernels",
        "fsdp",
        dict(FLASH, scatter_gather=0, gradient_bytes=4, main_bytes=12, dp_overlap=0.6),
    ),
    "hugging-face": Family(
        "Layers out of PyTorch's operations, such as Hugging Face's classes; fused attention",
        "eager",
        dict(FLASH, scatter_gather=0, gradient_bytes=4, main_bytes=12, dp_overlap=0.6),
    ),
    "megatron-core": Family(
        "Megatron-core since 2024: Megatron-LM, NeMo, Megatron-Bridge",
        "core",
        dict(FLASH, scatter_gather=0, gradient_bytes=2, main_bytes=12, **BESIDE),
    ),
}

ATTENTION = {
    # the first kernel and Triton's: set near what a fit to llm-foundry's rows had
    # On H100 it has no instruction of Hopper's: as on A100, but for 132 multiprocessors of 1755 MHz
    # instead of 108 of 1410, over FLASH of both.
    "flash1": dict(flash=1.0, flash_speed=0.65, newer_speed=0.32),
    # on H100 335 TFLOP/s of both passes (arXiv 2307.08691, section 4.1), 0.57 of FlashAttention-3
    # (arXiv 2407.08608, figures 5 and 6)
    "flash2": dict(flash=1.0, flash_speed=1.0, newer_speed=0.6, softmax_passes=6.0),
    "te": dict(flash=1.0, flash_speed=1.0, newer_speed=1.0, softmax_passes=6.0),
    "fused": dict(flash=0.0, flash_speed=1.0, newer_speed=1.0),
    # softmax in fp32 by kernels of its own: set near what a fit to Aleph Alpha's rows had
    "torch": dict(flash=0.0, flash_speed=1.0, newer_speed=1.0, softmax_passes=11.0),
}
# Large messages of nccl-tests reach 0.8 to 0.95 of InfiniBand's cards. The deviation of ranks is
# set near what a fit had, 0.0037 to 0.0044. Other networks are taken to be alike: no open row has
# them.
NETWORK_EFFICIENCY, STRAGGLING = 0.8, 0.004
FABRICS = ("infiniband", "roce", "efa", "slingshot", "ethernet")
# Published clusters with fewer cards than the GPU's maker provides for: what is believed of their
# share of those, and why. Jean Zay has a quarter of a DGX's, of which three quarters are reached.
CLUSTERS = {
    "jean-zay": (0.19, "Jean Zay: four Omni-Path cards of 100 Gb/s for eight A100 (BLOOM)"),
    "aleph-alpha": (0.19, "Aleph Alpha's cluster of A100: cards not stated, as Jean Zay's"),
}
# DeepEP reaches 43 to 58 of 50 GB/s of the network and 153 to 158 of NVLink's 160 (its README,
# "Normal kernels"), some of it by sending fewer copies than counted here.
DISPATCH = {
    "alltoall": dict(one_copy=0.0),
    "allgather": dict(one_copy=0.0),
    "deepep": dict(one_copy=1.0, efficiency=0.95),
    "hybridep": dict(one_copy=1.0, efficiency=0.95),
}
GRAPHS = {
    "none": dict(layers=1.0, experts=1.0),
    "layer": dict(layers=0.2, experts=1.0),
    "full": dict(layers=0.0, experts=0.0),
}


@dataclass(frozen=True)
class Target:
    """One figure of the document that a free constant sets, to `scale` times its value."""

    section: str
    key: str
    field: str
    scale: float = 1.0


@dataclass(frozen=True)
class Free:
    """One free constant: where it starts, its bounds, how firmly the start is believed.

    `weight` is the reciprocal of the believed relative error.
    """

    name: str
    start: float
    low: float
    high: float
    weight: float
    targets: tuple[Target, ...]


def free_constants() -> list[Free]:
    """All free constants."""
    return [*_gpu_constants(), *_kernel_constants(), *_fabric_constants(), *_software_constants()]


EVERY = ("ampere", "hopper", "blackwell", "ultra")
BLACKWELL = EVERY[2:]
# Products on Blackwell run at the power limit: 1000 W of B200, 1100 W of B300, 1200 W of GB200 and
# 1400 W of GB300 (NVIDIA's data sheets), for 2250 TFLOP/s of HGX boards in 16 bits and 2500 of
# Grace's. What each reaches of its peak, over what B200 does: fitted to the rows of each alone it
# was 1.13 for GB200 and 1.26 for GB300. Short benchmarks, which heat nothing up, see no such limit:
# 0.78, 0.79 and 0.73 of the peaks of B200, B300 and GB200 (stas00/ml-engineering,
# compute/accelerator, "Maximum Achievable Matmul FLOPS").
POWER = {"B300-SXM": 1.1, "GB200": 1.2 / (2500 / 2250), "GB300": 1.4 / (2500 / 2250)}

# By group: size m x n of a product that fills half a wave of tiles: multiprocessors times 128 x 128
# (128 x 256 on Blackwell, whose pairs of them share tiles), halved.
_AMPERE_TAIL, _HOPPER_TAIL, _BLACKWELL_TAIL = (
    108 * 128 * 128 / 2,
    132 * 128 * 128 / 2,
    148 * 128 * 256 / 2,
)
TAIL_PRODUCTS = dict(ampere=_AMPERE_TAIL, hopper=_HOPPER_TAIL) | dict.fromkeys(
    BLACKWELL, _BLACKWELL_TAIL
)
# Fused attention, both passes, causal, heads of 128, long sequences, of the 16-bit peak:
# FlashAttention-2 on A100 up to 0.6 (arXiv 2307.08691, figure 4); on H100 cuDNN 539 TFLOP/s forward
# of 16k and FlashAttention-3 616, backward 516 and 561 (arXiv 2407.08608, figures 5 and 6);
# PyTorch's own on an H200 511 of sequences of 4096 (docs/gpu.md), thus 580 of long ones; on B200
# cuDNN 9.13 1240 forward (FlashAttention-4: 1613, 1.3 times as fast), and backward less.
FLASH = dict(ampere=0.57, hopper=0.55, blackwell=0.5, ultra=0.595)
# FlashAttention-2 on A100: heads of 64 reach 0.91 of the rate of heads of 128 (arXiv 2307.08691,
# figure 4), FlashAttention-3 on H100 0.77 forward and 0.84 backward (arXiv 2407.08608, figures 5
# and 6). Exponentials are no faster on Blackwell, products are: assumed. Blackwell Ultra has twice
# the exponentials (NVIDIA, "Making Softmax More Efficient with NVIDIA Blackwell Ultra"), so that
# half as many products last as long, and heads of 128 reach 188 / 158 of Blackwell's rate.
HALF_HEADS = dict(ampere=14.0, hopper=35.0, blackwell=60.0, ultra=30.0)


def _gpu_constants() -> list[Free]:
    found: list[Free] = []
    # an A100's best products reach 0.86 (CUDA 12.1) to 0.87 (12.6) of its peak, by the same table
    found.append(_gpu("ampere", "product_efficiency", 0.86, 0.3, 0.95, 40))
    found.append(_gpu("ampere", "tail_products", _AMPERE_TAIL, 1e5, 1e7, 2))
    found.append(_gpu("hopper", "product_efficiency", 0.74, 0.3, 0.95, 5))
    found.append(_gpu(BLACKWELL, "product_efficiency", 0.52, 0.3, 0.75, 5, scales=POWER))
    found.append(_gpu(BLACKWELL, "fp8_efficiency", 0.55, 0.2, 0.75, 8, scales=POWER))
    found.append(_gpu(BLACKWELL, "fp4_efficiency", 0.4, 0.1, 0.75, 2, scales=POWER))
    found.append(_gpu(EVERY[1:], "nvlink_efficiency", 0.8, 0.3, 0.95, 15))
    found.append(_gpu("ampere", "batched_efficiency", 0.3, 0.05, 0.8, 2))
    found.append(_gpu(EVERY[1:], "scan_efficiency", 0.05, 0.005, 0.5, 1))
    found.append(_gpu("ampere", "misaligned_cost", 5.0, 1, 20, 1))
    return found


def _gpu(
    group: str | tuple[str, ...], field: str, *numbers: float, scales: Mapping[str, float] = {}
) -> Free:
    groups = (group,) if isinstance(group, str) else group
    keys = tuple(key for key, shared in GPUS.items() if shared in groups)
    targets = tuple(Target("gpus", key, field, scales.get(key, 1.0)) for key in keys)
    return Free(f"{'+'.join(groups)}.{field}", *numbers, targets=targets)


def _kernel_constants() -> list[Free]:
    unfused = [key for key in SOFTWARE if not SOFTWARE[key].fixed["flash"]]
    own = tuple(Target("software", key, "softmax_passes") for key in unfused)
    passes = (Target("attention", "fused", "softmax_passes"), *own)
    return [Free("fused.passes", 6, 2, 14, 2, passes)]


def _fabric_constants() -> list[Free]:
    dispatched = tuple(Target("dispatch", name, "efficiency") for name in ("alltoall", "allgather"))
    own = []
    for key, (start, _) in CLUSTERS.items():
        reached = Target("fabrics", key, "network_efficiency")
        own.append(Free(f"{key}.network", start, 0.02, 0.95, 3, (reached,)))
    sharding = (Target("software", "deepspeed-zero3-2021", "sharding_efficiency"),)
    return [
        *own,
        Free("zero3-2021.sharding", 0.3, 0.02, 1.0, 2, sharding),
        Free("alltoall", 0.6, 0.1, 1.0, 3, dispatched),
    ]


# What is believed of each kind of software: traffic of elementwise kernels over the fused minimum,
# and in how many seconds the host launches a layer's pass: 25 to 60 kernels and as many operations
# of Python and autograd, 10 us each. Fits found 1.24, 1.76 and 1.26 for the first three, and unseen
# sources miss none of that.
STREAMING = {"legacy": 1.3, "eager": 1.6, "fsdp": 1.3, "core": 1.0}
LAYER_LAUNCHES = {"legacy": 3e-4, "eager": 6e-4, "fsdp": 4e-4, "core": 4e-4}


def _software_constants() -> list[Free]:
    core = [key for key, family in SOFTWARE.items() if family.kind == "core"]
    return [
        _soft("core", core, "tp_overlap", 0.7, 0.0, 0.95, 3),
        _soft("core", core, "step_overhead", 2e-3, 0.0, 0.01, 2),
    ]


def _soft(kind: str, keys: list[str], field: str, *numbers: float) -> Free:
    targets = tuple(Target("software", key, field) for key in keys)
    return Free(f"{kind}.{field}", *numbers, targets=targets)
