"""Choose whether data or pipeline parallelism spans the slow links.

`tp-cp-ep-dp-pp` keeps the ranks of a data parallel group near each other and sends activations
over the slow links; `tp-cp-ep-pp-dp` keeps pipelines together and sends gradients over them. tp,
cp and ep are nearest in both, so only dp and pp are compared. Belongs here: bytes through the
busiest uplink, and the choice. Does not belong here: the borders (`placement`), or step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.base.units import short_bytes
from hpctrain.plan.documents import Layout, NodeRequest
from hpctrain.plan.layout_words import ORDERS, Order
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.placement import (
    Island,
    groups_at_border,
    neighbours_outside,
    slow_links,
    strides,
    wraps_outside,
)
from hpctrain.plan.mesh.rules import possible_orders
from hpctrain.plan.mesh.stages import build_stage, stage_expert_parameters
from hpctrain.plan.model.number_formats import (
    ELEMENT_BYTES,
    gradient_bytes,
    sent_weight_bytes,
)
from hpctrain.plan.model.parameters import expert_tp
from hpctrain.plan.request import PlanRequest


@dataclass(frozen=True)
class OrderChoice:
    """The order and, where a slow link made a difference, one sentence about it."""

    order: Order
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step: through each link of the rings of a rank, and of one pipeline message.

    A message is an activation or its gradient, for one microbatch and one chunk. Dense weights
    and experts have rings of their own.
    """

    dense_ring_bytes: float
    expert_ring_bytes: float
    message_bytes: float
    microbatches: int


@dataclass(frozen=True)
class UplinkLoad:
    """Bytes that one step sends out of one group of nodes; `uplink`: its bytes/s."""

    gradients_bytes: float
    activations_bytes: float
    uplink: float

    @property
    def seconds(self) -> float:
        """Time at full speed, if nothing else is on the uplink."""
        return (self.gradients_bytes + self.activations_bytes) / self.uplink


def choose_order(request: PlanRequest, candidate: Candidate, nodes: NodeRequest) -> OrderChoice:
    """Choose the order: the spec's; for `auto`, the one with the least time on the busiest uplink.

    Equal times, or no slow link between the nodes of the run, give Megatron's default. Orders
    that megatron-core refuses are not considered.
    """
    spec = request.spec
    given = "auto" if spec.parallel == "auto" else spec.parallel.order
    islands = slow_links(nodes, request.profile)
    possible = [ORDERS[number] for number in possible_orders(spec, candidate)]
    loads = {order: busiest_uplink(request, candidate, order, islands) for order in possible}
    if given == "auto":
        chosen = min(possible, key=lambda order: loads[order].seconds if islands else 0.0)
    else:
        chosen = given
    if not islands or len({load.seconds for load in loads.values()}) == 1:
        return OrderChoice(chosen, ())
    others = [load for order, load in loads.items() if order != chosen]
    why = f"order {chosen}{'' if given == 'auto' else ', as the spec says'}"
    compared = f", the other order {_load(others[0])}" if others else ""
    sent = f"a step sends {_load(loads[chosen])} out of the busiest slow link"
    return OrderChoice(chosen, (f"{why}: {sent}{compared}.",))


def step_traffic(request: PlanRequest, candidate: Candidate) -> Traffic:
    """Count the bytes that the rings of the fullest stage and a pipeline send in one step.

    A ring of n ranks moves (n - 1) / n of the tensor over each of its links in a reduce-scatter
    and again in an all-gather (Thakur, Rabenseifner and Gropp 2005). With the
    distributed optimizer the all-gather moves weights instead (ZeRO-1, arXiv 1910.02054, 7.1).
    A message is [s b / c, h], split by t with sequence parallelism and by DeepSpeed, and per rank.
    """
    spec, layout, model = request.spec, candidate.layout, request.spec.model
    element, summed = ELEMENT_BYTES[spec.precision], gradient_bytes(spec)
    moved = summed + (sent_weight_bytes(spec) if spec.optimizer.zero != 0 else summed)
    pairs = [
        (
            build_stage(
                model, layout, candidate.split, index, request.counts.vocab_multiple
            ).parameters_per_gpu,
            stage_expert_parameters(model, layout, candidate.split, index),
        )
        for index in sorted({0, layout.pp // 2, layout.pp - 1})
    ]
    whole, experts = max(pairs)
    replicas, copies = layout.dp * layout.cp, _expert_copies(layout)
    tokens = candidate.micro_batch * model.seq / layout.cp
    is_split = layout.sequence_parallel or spec.engine.abilities.splits_stage_messages
    split = layout.tp if is_split else 1
    return Traffic(
        dense_ring_bytes=moved * (whole - experts) * (replicas - 1) / replicas,
        expert_ring_bytes=moved * experts * (copies - 1) / copies,
        message_bytes=element * model.hidden * tokens / split,
        microbatches=candidate.accumulation,
    )


def _expert_copies(layout: Layout) -> int:
    """Count the ranks that hold the same experts: expert data parallelism."""
    shared = expert_tp(layout.tp, layout.ep, layout.etp) * layout.ep
    return max(1, layout.tp * layout.cp * layout.dp // shared)


def busiest_uplink(
    request: PlanRequest, candidate: Candidate, order: Order, islands: Sequence[Island]
) -> UplinkLoad:
    """Find the uplink that is busy longest in a step of this order."""
    traffic = step_traffic(request, candidate)
    loads = [uplink_load(candidate, order, island, traffic) for island in islands]
    return max(loads, key=lambda load: load.seconds, default=UplinkLoad(0, 0, 1))


def uplink_load(candidate: Candidate, order: Order, island: Island, traffic: Traffic) -> UplinkLoad:
    """Count the bytes that one step sends out of an island.

    A message goes to the next stage once for each chunk, and from the last stage to the first
    once for each chunk but one; gradients go the other way (Narayanan et al. 2021, section 2.2).
    Rings of dense weights run through cp and dp where these are adjacent. In the mesh of experts,
    expert tp and ep are the nearest axes.
    """
    layout = candidate.layout.model_copy(update={"order": order})
    stride = strides(layout)
    chunks = sum(neighbours_outside(stride["pp"], layout.pp, island)) * layout.vpp
    wraps = sum(wraps_outside(stride["pp"], layout.pp, island)) * (layout.vpp - 1)
    messages = (chunks + wraps) * traffic.microbatches
    if stride["dp"] == stride["cp"] * layout.cp:
        dense_flows = groups_at_border(stride["cp"], layout.dp * layout.cp, island)
    else:
        dense_flows = groups_at_border(stride["dp"], layout.dp, island) // layout.cp
    near = expert_tp(layout.tp, layout.ep, layout.etp) * layout.ep
    if layout.order.endswith("dp"):
        near *= layout.pp
    expert_flows = groups_at_border(near, _expert_copies(layout), island)
    gradients = dense_flows * traffic.dense_ring_bytes
    gradients += expert_flows * traffic.expert_ring_bytes
    return UplinkLoad(gradients, messages * traffic.message_bytes, island.uplink)


def _load(load: UplinkLoad) -> str:
    """Format as `3.1 GiB of gradients and 1.2 GiB of activations (0.4 s)`."""
    parts = [
        f"{short_bytes(round(amount))} of {name}"
        for name, amount in (
            ("gradients", load.gradients_bytes),
            ("activations", load.activations_bytes),
        )
        if amount
    ]
    return f"{' and '.join(parts) or 'nothing'} ({load.seconds:.2g} s)"
