"""Describe the GPUs of a service: one replica for the formulas, and what a cluster offers.

Belongs here: data sheets beside calibrated shares; from a profile (as it is for one partition) to
GPUs of one kind, how many, in what pieces, at what price. Does not belong here: the values of the
shares (`catalogue/serving.yaml`), formulas (`step_time`), what fits onto the GPUs (`candidates`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.cost.case import Array, Machine
from hpctrain.plan.cost.from_spec import calibration_of, machine_of, peak_rate
from hpctrain.serve.plan.served_model import ReplicaLayout, ServedModel
from hpctrain.spec.calibration import (
    Calibration,
    FabricCalibration,
    ServingCalibration,
    ServingEngineCalibration,
    ServingGpuCalibration,
)
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.service import ServiceResourcesSpec


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


@dataclass(frozen=True)
class Offer:
    """GPUs of one kind. `most_gpus` may run at once, `most_replica_gpus` in one job.

    `price` is that of a GPU-hour; None where the profile has none: GPU-hours are compared then.
    `network_bandwidth` is that of a GPU's share of the node's cards, in bytes per second.
    """

    name: str
    gpu: Gpu
    machine: ServingMachine
    per_node: int
    most_gpus: int
    most_replica_gpus: int
    price: float | None
    currency: str | None
    network_bandwidth: float

    def billed_gpus(self, gpus: int) -> int:
        """Count the GPUs that a replica pays for: above one node whole nodes."""
        nodes = -(-gpus // self.per_node)
        return gpus if nodes == 1 else nodes * self.per_node

    def hourly(self, gpus: int) -> float:
        """Return what `gpus` cost per hour; GPU-hours where there is no price."""
        return gpus * (1.0 if self.price is None else self.price)


def offer_of(
    profile: ClusterProfile, gpu: Gpu, machine: ServingMachine, resources: ServiceResourcesSpec
) -> Offer:
    """Describe the GPUs of the partition that a service asks for."""
    partition = profile.slurm.partition(resources.partition)
    nodes = _least(profile.nodes.count, profile.limits.max_nodes)
    job_nodes = _least(nodes, partition.max_nodes if partition else None)
    preemptible = partition is not None and partition.preemption.mode != "off"
    prices = profile.prices
    price = None
    if prices is not None:
        price = prices.spot if preemptible and prices.spot is not None else prices.on_demand
    return Offer(
        name=profile.name,
        gpu=gpu,
        machine=machine,
        per_node=profile.gpu.per_node,
        most_gpus=_least(profile.gpu_count, resources.max_gpus, profile.limits.grp_gpus),
        most_replica_gpus=_least(
            job_nodes * profile.gpu.per_node,
            profile.limits.max_gpus,
            partition.max_gpus if partition else None,
        ),
        price=price,
        currency=prices.currency if prices else None,
        network_bandwidth=float(gpu.network_bandwidth),
    )


def _least(first: int, *others: int | None) -> int:
    return min([first, *(one for one in others if one is not None)])
