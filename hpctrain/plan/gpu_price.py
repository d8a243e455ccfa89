"""Chooses what a GPU-hour of a run or a service costs: spot where its partition can be preempted.

Belongs here: the choice, which is that of the forecast (`hpctrain.plan.forecast`). Does not belong
here: amounts.
"""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.spec.service import ServiceSpec


class GpuPrice(NamedTuple):
    """The price of one GPU-hour, in a currency."""

    per_gpu_hour: float
    currency: str


def gpu_price(spec: RunSpec | ServiceSpec, profile: ClusterProfile) -> GpuPrice | None:
    """Return the price that a profile has for the partition of a spec; None without prices."""
    prices = profile.for_partition(spec.resources.partition).prices
    if prices is None:
        return None
    partition = profile.slurm.partition(spec.resources.partition)
    preemptible = partition is not None and partition.preemption.mode != "off"
    amount = prices.spot if preemptible and prices.spot else prices.on_demand
    return GpuPrice(amount, prices.currency)
