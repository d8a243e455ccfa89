"""Links between the nodes of a cluster profile: fabric, switches, islands.

Belongs here: facts about the network above one node. Does not belong here: the links inside a node
(`hardware`).
"""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from hpctrain.base.units import Bandwidth, Duration
from hpctrain.spec.document import Document
from hpctrain.spec.run import Name


class SwitchProfile(Document):
    """Topology above the node, as Slurm's topology plugins know it."""

    plugin: Literal["none", "tree", "block"] = Field("none", description="Slurm's topology plugin")
    nodes_per_leaf: int | None = Field(None, ge=1, description="Nodes under one leaf or block")
    usable_per_leaf: int | None = Field(
        None,
        ge=1,
        description="How many of them one job may count on, such as 16 of the 18 of a rack; "
        "default: all",
    )
    oversubscription: float = Field(1.0, ge=1, description="Leaf down-link to up-link ratio")
    request: bool = Field(
        True, description="Ask for few leaves (tree: `--switches`) or whole blocks (`--segment`)"
    )
    segment: Literal["auto", "force", "forbid"] = Field(
        "auto",
        description="block: `--segment` where the plan relies on it, for every job, or never "
        "(as `request: false`)",
    )
    wait: Duration | None = Field(
        None,
        ge=60,
        description="tree: how long a job waits for few leaves; default: 5 min, Slurm's own limit",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.plugin == "none") != (self.nodes_per_leaf is None):
            raise ValueError("`nodes_per_leaf` goes together with plugin `tree` or `block`")
        if self.wait is not None and (self.plugin != "tree" or not self.request):
            raise ValueError("`wait` goes together with plugin `tree` and `request: true`")
        if self.segment != "auto" and self.plugin != "block":
            raise ValueError("`segment` goes together with plugin `block`")
        if self.segment == "force" and not self.request:
            raise ValueError("`segment: force` contradicts `request: false`")
        if self.usable_per_leaf is not None and self.usable_per_leaf > (self.nodes_per_leaf or 0):
            raise ValueError("`usable_per_leaf` is at most `nodes_per_leaf`")
        return self

    @property
    def usable_nodes(self) -> int | None:
        """Nodes under one leaf or block that one job may count on; None where they are unknown."""
        return self.usable_per_leaf or self.nodes_per_leaf

    @property
    def segment_policy(self) -> Literal["auto", "force", "forbid"]:
        """Whether jobs request segments; none without the plugin, or with `request: false`."""
        return self.segment if self.plugin == "block" and self.request else "forbid"


class IslandProfile(Document):
    """A group of nodes behind one link to the others, such as a building or a rack row.

    Slurm numbers ranks along the names of nodes, so an island has to be consecutive names.
    """

    nodes: int = Field(ge=1, description="Nodes of this island, in the order of their names")
    uplink: Bandwidth = Field(gt=0, description="Of the whole island to the others, per direction")
    feature: Name | None = Field(None, description="Slurm feature of its nodes, for `--constraint`")


class NetworkProfile(Document):
    """Links between nodes."""

    fabric: Literal["infiniband", "roce", "efa", "slingshot", "ethernet"] = Field(
        description="Kind of network that NCCL uses between nodes"
    )
    nics_per_node: int = Field(ge=1, description="Cards of one node that NCCL may use")
    nic_bandwidth: Bandwidth = Field(gt=0, description="Per card and direction")
    interface: str | None = Field(
        None,
        min_length=1,
        description="For TCP traffic between nodes: value of NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME where `environment` does not set them",
    )
    master_address: str | None = Field(
        None,
        description="MASTER_ADDR: `ip`, or a name with `{node}`, such as `{node}i`; default: the "
        "address at which Slurm reaches the node",
    )
    ports: str | None = Field(
        None, description="MASTER_PORT is one of these, such as 20000-21000; default: 20000-29999"
    )
    switches: SwitchProfile = SwitchProfile()
    islands: tuple[IslandProfile, ...] = Field(
        (), description="Groups of nodes with slower links between them; empty: all alike"
    )

    @field_validator("master_address")
    @classmethod
    def _names_the_node(cls, address: str | None) -> str | None:
        if address is None or address == "ip":
            return address
        rest = address.replace("{node}", "", 1)
        if rest == address or not re.fullmatch(r"[A-Za-z0-9.-]*", rest):
            raise ValueError("expected `ip`, or a host name with `{node}` once, such as `{node}i`")
        return address

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str | None) -> str | None:
        if ports is not None:
            port_range(ports)
        return ports

    @field_validator("islands")
    @classmethod
    def _islands_differ(cls, islands: tuple[IslandProfile, ...]) -> tuple[IslandProfile, ...]:
        if len(islands) == 1:
            raise ValueError("a single island has nobody behind its uplink: list all, or none")
        features = [island.feature for island in islands if island.feature is not None]
        if len(features) not in (0, len(islands)):
            raise ValueError("give every island a `feature`, or none of them")
        if len(set(features)) != len(features):
            raise ValueError(f"two islands have one feature: {', '.join(features)}")
        return islands


def port_range(text: str) -> tuple[int, int]:
    """Return the first and the last port of a range such as `20000-21000`.

    Raises ValueError for another form. Ports below 1024 are those of the system (RFC 6335).
    """
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1024 <= first <= last <= 65535:
        raise ValueError("expected two ports between 1024 and 65535, such as 20000-21000")
    return first, last
