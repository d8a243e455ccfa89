"""Write a planned spec down so that it is planned the same again: layout and batch made explicit.

Belongs here: that document. Does not belong here: planning, or reading the document (see
`hpctrain.actions.calibrate`).
"""

from __future__ import annotations

from hpctrain.plan.documents import Plan
from hpctrain.spec.run import ParallelSpec, RunSpec


def planned_spec(spec: RunSpec, plan: Plan) -> str:
    """Return the spec as JSON, with the layout, micro-batch and recomputation of its plan."""
    layout = plan.layout
    parallel = ParallelSpec(
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        order=layout.order,
        sequence_parallel=layout.sequence_parallel if layout.tp > 1 else None,
    )
    batch = spec.batch.model_copy(update={"micro": plan.batch.micro_batch})
    changed = {"parallel": parallel, "batch": batch, "recompute": plan.recompute}
    return spec.model_copy(update=changed).model_dump_json(by_alias=True)
