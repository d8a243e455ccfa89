"""Compute the speed of GPUs and links that a plan assumes, to compare measurements with it.

Belongs here: the rate of large matrix products, and the bus bandwidth of each axis. Does not belong
here: measuring (see `hpctrain.train.speed_check`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.cost.case import Case, Mesh
from hpctrain.plan.cost.from_spec import machine_for, shape_of, software_for
from hpctrain.plan.cost.links import reduce_seconds, send_seconds
from hpctrain.plan.documents import AxisPlacement, Layout, Plan
from hpctrain.plan.layout_words import Axis
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.engines.abilities import MODEL_AXES

# Long enough that the start of an operation does not count.
_LARGE_BYTES = 2**30


@dataclass(frozen=True)
class ExpectedSpeed:
    """What a plan assumes: FLOP/s of 16-bit products, and bytes per second by axis.

    The bandwidth of tp, cp, ep and dp is the bus bandwidth of an all-reduce (nccl-tests,
    doc/PERFORMANCE.md); that of pp is of a message to a neighbour.
    """

    product_flops_per_second: float
    bytes_per_second: dict[Axis, float]


def expected_speed(request: PlanRequest, plan: Plan) -> ExpectedSpeed | None:
    """Compute the expected speed of a plan; None when the GPU is not known."""
    machine = machine_for(request)
    if machine is None:
        return None
    # links depend on the sizes of the axes, and on nothing else of a mesh
    sizes = {axis: getattr(plan.layout, axis) for axis in (*MODEL_AXES, "dp")}
    case = Case(shape_of(request.spec.model), Mesh(**sizes), machine, software_for(request))
    places = [_as_grouped(place, plan.layout) for place in plan.placements]
    links = {place.axis: _bandwidth(case, place) for place in places if place.size > 1}
    return ExpectedSpeed(float(machine.peak * machine.product_efficiency), links)


def _as_grouped(place: AxisPlacement, layout: Layout) -> AxisPlacement:
    """Widen dp to the ranks that sum gradients together: those of dp and cp.

    They are one regular group unless pipeline stages lie between; then dp alone is priced, whose
    links are the slower ones.
    """
    if place.axis != "dp" or layout.cp == 1 or place.stride != layout.tp * layout.cp:
        return place
    return place.model_copy(update={"size": layout.dp * layout.cp, "stride": layout.tp})


def _bandwidth(case: Case, place: AxisPlacement) -> float:
    """Return the bus bandwidth of an axis in bytes per second, from the time of a large message."""
    if place.axis == "pp":
        return float(_LARGE_BYTES / send_seconds(case, _LARGE_BYTES, place.stride))
    seconds = float(reduce_seconds(case, _LARGE_BYTES, place.size, place.stride))
    return 2 * (place.size - 1) / place.size * _LARGE_BYTES / seconds
