"""How the job of a run gives its metrics away: the section `metrics` of a spec.

Belongs here: these fields. Does not belong here: the metrics themselves (`hpctrain.observe`), what
a site has for them (`hpctrain.spec.profile.metrics`).
"""

from __future__ import annotations

from pydantic import Field

from hpctrain.spec.document import Document


class MetricsSpec(Document):
    """How the job of a run gives metrics to Prometheus. `hpctrain exporter` needs none of it."""

    textfile: bool = Field(
        True,
        description="Write them for the node_exporter of the first node, where the profile names "
        "its directory (`metrics.textfile`)",
    )
    endpoint: bool = Field(
        False,
        description="Serve them over HTTP from the first node, without a password; its address is "
        "in the run directory and in RUNS/.file_sd",
    )
