"""From documents to the numbers that the formulas take: data sheets times calibrated shares.

Belongs here: choosing the constants of one GPU and one generation of software. Does not belong
here: their values (`catalogue/gpus.yaml`, `catalogue/calibration.yaml`) or reading those files.
"""

from __future__ import annotations

from dataclasses import fields

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.plan.cost.case import Machine, Software
from hpctrain.spec.calibration import (
    FORWARD_RATIO,
    HALF_LENGTH,
    HALF_LENGTH_CAUSAL,
    Calibration,
    FabricCalibration,
    GpuCalibration,
    SiteCalibration,
    SoftwareCalibration,
)
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.document import Document
from hpctrain.spec.engines.registry import abilities_of

# What copies between pinned host memory and a GPU reach of the link: 25 of PCIe 4's 32 GB/s.
HOST_LINK_SHARE = 25 / 32
PCIE4_BANDWIDTH = 32e9  # bytes/s and direction of 16 lanes; PCI-SIG, PCI Express 4.0
# What the driver keeps of the memory that it reports: 143,771 MiB are 139.8 GiB to a program on an
# H200 (docs/gpu.md), 81,920 MiB are 79.15 GiB on an A100.
DRIVER_BYTES = 0.6 * 2**30
# Of CUDA: 400 MB since kernels are loaded when they are called (CUDA 11.7, pytorch/pytorch issue
# 109888), and some for cuBLAS, whose workspaces are the allocator's. Before it were 1.3 GB
# (transformers' documentation, "GPU memory": "kernels alone take up").
CONTEXT_BYTES = 0.5 * 2**30
# NCCL's buffers of one communicator: 10 MiB (NVIDIA/nccl issue 1685, allocations in its log) for
# each of 24 channels over an A100's NVLinks and of three neighbours, two in a tree, one in a ring.
COMMUNICATOR_BYTES = 24 * 3 * 10 * 2**20
# Activations as they lie in memory over their bytes, where the allocator cannot grow its segments
# (before PyTorch 2.1, on AMD's GPUs): freed blocks between kept ones. BLOOM's trials want 1.1 to
# 1.18, 410 layouts of Aleph Alpha at least 1.1, the zero-bubble runs at most 1.12, with which they
# still fit (bench/fit_memory.py).
FRAGMENTED = 1.12
LOW_PRECISIONS = {"fp8": ("fp8",), "fp4": ("fp4", "fp8")}


def calibration_of(calibration: Calibration, gpu: Gpu) -> GpuCalibration:
    """Select the constants of this GPU, else of its generation, else of the last one listed.

    Raises InvalidInputError when a calibration has no GPU at all.
    """
    for key in (gpu.name, gpu.generation):
        if key in calibration.gpus:
            return calibration.gpus[key]
    if not calibration.gpus:
        raise InvalidInputError([Problem("the calibration names no GPU")])
    return list(calibration.gpus.values())[-1]


def calibrated_at_site(calibration: Calibration, site: SiteCalibration, gpu: Gpu) -> Calibration:
    """Put the figures that a site has measured in place of the packaged ones.

    Rates of links become shares of what catalogue and profile give for this GPU; the network's
    takes the place of that of every fabric, as a site has one.
    """
    shares: dict[str, object] = {
        name: value
        for name in ("product_efficiency", "flash_efficiency", "memory_efficiency")
        if (value := getattr(site, name)) is not None
    }
    if site.nvlink_bandwidth is not None:
        shares["nvlink_efficiency"] = min(1.0, site.nvlink_bandwidth / gpu.nvlink_bandwidth)
    shares["provenance"] = site.provenance
    own = calibration_of(calibration, gpu).model_copy(update=shares)
    fabrics = calibration.fabrics
    if site.network_bandwidth is not None:
        share = min(1.0, site.network_bandwidth / gpu.network_bandwidth)
        measured = {"network_efficiency": share, "provenance": site.provenance}
        fabrics = {name: one.model_copy(update=measured) for name, one in fabrics.items()}
    return calibration.model_copy(
        update={"gpus": {**calibration.gpus, gpu.name: own}, "fabrics": fabrics}
    )


def machine_of(
    gpu: Gpu,
    shares: GpuCalibration,
    fabric: FabricCalibration,
    *,
    precision: str = "bf16",
    leaf_gpus: int = 0,
    oversubscription: float = 1.0,
) -> Machine:
    """Describe a GPU with its links. `precision`: fp32, fp16, bf16, fp8 or fp4.

    A GPU without the low precision computes at its 16-bit rate; fp32 means the fp32 peak.
    """
    wide = peak_rate(gpu, "fp32" if precision == "fp32" else "bf16")
    low = next(
        (float(gpu.peak[p]) for p in LOW_PRECISIONS.get(precision, ()) if p in gpu.peak),
        wide,
    )
    return Machine(
        peak=wide,
        peak_low=low,
        memory_bandwidth=float(gpu.memory_bandwidth),
        nvlink_bandwidth=float(gpu.nvlink_bandwidth),
        network_bandwidth=float(gpu.network_bandwidth),
        domain=gpu.nvlink_domain,
        low_efficiency=shares.fp4_efficiency if precision == "fp4" else shares.fp8_efficiency,
        half_length=HALF_LENGTH,
        half_length_causal=HALF_LENGTH_CAUSAL,
        forward_ratio=FORWARD_RATIO,
        **_constants(shares, Machine),
        **_constants(fabric, Machine),
        leaf_gpus=leaf_gpus,
        oversubscription=oversubscription,
        host_bandwidth=HOST_LINK_SHARE * float(gpu.host_bandwidth or PCIE4_BANDWIDTH),
    )


def peak_rate(gpu: Gpu, precision: str) -> float:
    """Return the dense FLOP/s of a 16-bit or 32-bit precision, or of the next best one listed."""
    order = ("fp32",) if precision == "fp32" else ("bf16", "fp16", "fp32")
    for name in order:
        if name in gpu.peak:
            return float(gpu.peak[name])
    return float(max(gpu.peak.values()))


def newer(gpu: Gpu) -> bool:
    """Tell whether a GPU has kernels of attention that FlashAttention-2 does not reach."""
    return gpu.generation not in ("volta", "ampere", "ada", "cdna2", "cdna3")


def fabric_of(calibration: Calibration, fabric: str) -> FabricCalibration:
    """Select the constants of a network. Raises InvalidInputError if it is missing."""
    if fabric not in calibration.fabrics:
        raise InvalidInputError([Problem(f"the calibration has no fabric `{fabric}`")])
    return calibration.fabrics[fabric]


def software_entry(
    calibration: Calibration, engine: str, *, eager: bool = False, local: bool = False
) -> SoftwareCalibration:
    """Select the constants that `plan` takes for an engine, ours or that of a published run.

    `eager` and `local`: see `software_name`. Raises InvalidInputError if the calibration has no
    such software.
    """
    key = software_name(engine, eager=eager, local=local)
    if key not in calibration.software:
        raise InvalidInputError([Problem(f"the calibration has no software `{key}`")])
    return calibration.software[key]


def software_name(engine: str, *, eager: bool = False, local: bool = False) -> str:
    """Name the software that an engine is: what it has today, not what it was.

    Megatron's own FSDP shares all kernels with the rest of megatron-core. `local`: Megatron's
    layers without TransformerEngine, whose elementwise kernels are those of Megatron-LM before
    it. `eager`: layers out of PyTorch's operations, such as Hugging Face's classes under FSDP, DDP
    and DeepSpeed.
    """
    key = abilities_of(engine.removesuffix("-fsdp")).calibration
    if eager:
        return "hugging-face"
    return "megatron-2022" if local and key == "megatron-core" else key


def software_of(calibration: SoftwareCalibration) -> Software:
    """Select the constants of one generation of software."""
    return Software(**_constants(calibration, Software))


def _constants(measured: Document, record: type[Machine] | type[Software]) -> dict[str, float]:
    """Select the fields of a calibration that a record of the cost model has, too."""
    names = {field.name for field in fields(record)}
    return {name: value for name, value in measured if name in names}
