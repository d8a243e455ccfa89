"""Describe one replica for the formulas of serving: model, GPU, layout and engine.

Belongs here: data sheets beside calibrated shares. Does not belong here: their values
(`catalogue/serving.yaml`), reading that file, formulas (`step_time`, `kv_cache`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.cost.case import Array, Machine
from hpctrain.plan.cost.from_spec import calibration_of, machine_of, peak_rate
from hpctrain.serve.plan.served_model import ReplicaLayout, ServedModel
from hpctrain.spec.calibration import Calibration, FabricCalibration
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.serving_calibration import (
    ServingCalibration,
    ServingEngineCalibration,
    ServingGpuCalibration,
)


@dataclass(frozen=True)
class ServingMachine:
    """A GPU with its links and the shares of the data sheet that inference reaches."""

    links: Machine  # NVLink and network, as in the training cost model
    memory: Array  # bytes
    memory_bandwidth: Array  # bytes/s
    peak_16: Array  # dense FLOP/s with 16-bit operands
    peak_8: Array
    peak_4: Array
    shares: ServingGpuCalibration


@dataclass(frozen=True)
class ReplicaCase:
    """One replica: model, GPU, layout and engine. All fields broadcast."""

    served: ServedModel
    gpu: ServingMachine
    layout: ReplicaLayout
    engine: ServingEngineCalibration


def serving_machine(
    gpu: Gpu,
    serving: ServingCalibration,
    training: Calibration,
    fabric: FabricCalibration,
) -> ServingMachine:
    """Describe a GPU for inference; a GPU without constants of its own takes its generation's."""
    wide = peak_rate(gpu, "bf16")
    eight = float(gpu.peak.get("fp8", wide))
    return ServingMachine(
        links=machine_of(gpu, calibration_of(training, gpu), fabric),
        memory=float(gpu.memory),
        memory_bandwidth=float(gpu.memory_bandwidth),
        peak_16=wide,
        peak_8=eight,
        peak_4=float(gpu.peak.get("fp4", eight)),
        shares=serving.gpu(gpu.name, gpu.generation),
    )
