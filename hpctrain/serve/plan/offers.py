"""What a cluster offers to a service: GPUs of one kind, how many, in what pieces, at what price.

Belongs here: from a profile (as it is for one partition) to these figures. Does not belong here:
what fits onto them (`candidates`), files.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.serve.plan.serving_machine import ServingMachine
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.service import ServiceResourcesSpec


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
