"""From documents to the numbers that the formulas take: data sheets times calibrated shares.

Belongs here: choosing the constants of one GPU and one generation of software. Does not belong
here: their values (`catalogue/gpus.yaml`, `catalogue/calibration.yaml`) or reading those files.
"""

from __future__ import annotations

from dataclasses import fields

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.plan.cost.case import Machine, Software
from hpctrain.spec.calibration import (
    Calibration,
    GpuCalibration,
    SiteCalibration,
    SoftwareCalibration,
)
from hpctrain.spec.catalogue import Gpu

# What copies between pinned host memory and a GPU reach of the link: 25 of PCIe 4's 32 GB/s.
HOST_LINK_SHARE = 25 / 32
PCIE4_BANDWIDTH = 32e9  # bytes/s and direction of 16 lanes; PCI-SIG, PCI Express 4.0
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

    Rates of links become shares of what catalogue and profile give for this GPU. The network's
    share belongs to the software in the packaged figures; a site has measured its own.
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
    software = calibration.software
    if site.network_bandwidth is not None:
        share = min(1.0, site.network_bandwidth / gpu.network_bandwidth)
        software = {
            name: entry.model_copy(update={"network_efficiency": share})
            for name, entry in software.items()
        }
    return calibration.model_copy(
        update={"gpus": {**calibration.gpus, gpu.name: own}, "software": software}
    )


def machine_of(
    gpu: Gpu,
    shares: GpuCalibration,
    software: SoftwareCalibration,
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
        product_efficiency=shares.product_efficiency,
        low_efficiency=shares.fp4_efficiency if precision == "fp4" else shares.fp8_efficiency,
        flash_efficiency=shares.flash_efficiency,
        batched_efficiency=shares.batched_efficiency,
        memory_efficiency=shares.memory_efficiency,
        nvlink_efficiency=shares.nvlink_efficiency,
        network_efficiency=software.network_efficiency,
        tail_products=shares.tail_products,
        scan_efficiency=shares.scan_efficiency,
        misaligned_cost=shares.misaligned_cost,
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


def software_of(calibration: SoftwareCalibration) -> Software:
    """Select the constants of one generation of software."""
    names = {field.name for field in fields(Software)}
    values = {
        name: getattr(calibration, name) for name in type(calibration).model_fields if name in names
    }
    return Software(**values)
