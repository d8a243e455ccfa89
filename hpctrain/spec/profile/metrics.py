"""How metrics of jobs reach the Prometheus of a site: the section `metrics` of a profile.

Belongs here: these fields. Does not belong here: whether a run uses them (`hpctrain.spec.run`).
"""

from __future__ import annotations

from pydantic import Field, field_validator

from hpctrain.spec.document import Document
from hpctrain.spec.profile.network import port_range


class MetricsProfile(Document):
    """How metrics of jobs reach the Prometheus of a site."""

    textfile: str | None = Field(
        None,
        pattern=r"^/",
        description="Directory of node_exporter's textfile collector, in which users may write; "
        "absent: none",
    )
    ports: str | None = Field(
        None,
        description="Ports that endpoints of jobs may take, such as 9400-9499; default: any",
    )
    address: str | None = Field(
        None, description="Address that endpoints listen on; default: every address of the node"
    )

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str | None) -> str | None:
        if ports is not None:
            port_range(ports)
        return ports
