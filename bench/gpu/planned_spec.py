"""Write a planned spec down so that it is planned the same again: layout and batch made explicit.

Belongs here: that document. Does not belong here: planning, or reading the document (see
`hpctrain.site.calibrate`).
"""

from __future__ import annotations

from hpctrain.plan.documents import Plan
from hpctrain.plan.job import spec_as_planned
from hpctrain.spec.run import RunSpec


def planned_spec(spec: RunSpec, plan: Plan) -> str:
    """Return the spec as JSON, with all that its plan has decided."""
    return spec_as_planned(spec, plan).model_dump_json(by_alias=True)
