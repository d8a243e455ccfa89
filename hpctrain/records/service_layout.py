"""Where everything lies inside the directory of a service. No path is spelled anywhere else.

A service directory lies beside run directories. Each of its jobs has a run directory of its own
below it (`RunLayout`), with its own ledger, epochs and logs, because the same supervisor looks
after it: `replicas/r001-g002` is the second job generation of replica 1, `router` the router's.

service.yaml profile.yaml plan.json    the resolved documents, and the plan (`ServicePlan`)
prototype/                             what the run directory of each replica is made of
service.json                           settings of controller and router (`ServiceSettings`)
ledger.jsonl                           what the controller and people have done to the service
epochs/                                one file per controller; the highest number steers
control/scale.json                     how many replicas a person wants (`ScaleRequest`)
control/restart.json                   a rolling restart that a person wants (`RestartRequest`)
control/down                           exists while the service is to end
endpoints/r001-g002.json               a replica that answers, leased (`Endpoint`)
rotation.json                          which replicas the router asks now (`Rotation`)
address.json                           where clients send requests (`Address`)
state.json                             what the controller last saw and wants (`ServiceState`)
traffic.json                           what router and engines have counted (`Traffic`)
replicas/r001-g002/                    run directory of one replica's job
router/ router-g002/                   run directories of the router's first job, and of the next
tests/                                 results of `serve test`
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.durable import make_private_directory
from hpctrain.records.layout import Place, RunLayout

_ROUTER = re.compile(r"router(?:-g(\d{3,}))?")
_REPLICA = re.compile(r"r(\d{3,})-g(\d{3,})")


@dataclass(frozen=True, order=True)
class ReplicaName:
    """One job of one replica: its number, and the generation of the job."""

    number: int
    generation: int

    def __str__(self) -> str:
        return f"r{self.number:03d}-g{self.generation:03d}"

    @classmethod
    def parse(cls, text: str) -> ReplicaName | None:
        """Read the written form; None for anything else."""
        match = _REPLICA.fullmatch(text)
        return None if match is None else cls(int(match[1]), int(match[2]))

    @property
    def next_generation(self) -> ReplicaName:
        return ReplicaName(self.number, self.generation + 1)


# No replica has this name: in the documents of the prototype it stands for any.
PROTOTYPE = ReplicaName(0, 0)


@dataclass(frozen=True)
class ServiceLayout:
    """The paths of one service directory."""

    directory: Path

    @property
    def service_id(self) -> str:
        return self.directory.name

    spec = Place("service.yaml")
    profile = Place("profile.yaml")
    plan = Place("plan.json")
    settings = Place("service.json")

    @property
    def prototype(self) -> RunLayout:
        """The documents of all replicas, written for a replica whose name is `PROTOTYPE`."""
        return RunLayout(self.directory / "prototype")

    ledger = Place("ledger.jsonl")
    epochs = Place("epochs")
    control = Place("control")
    scale_request = Place("control/scale.json")
    restart_request = Place("control/restart.json")
    down_request = Place("control/down")
    endpoints = Place("endpoints")

    def endpoint(self, name: ReplicaName) -> Path:
        return self.endpoints / f"{name}.json"

    rotation = Place("rotation.json")
    address = Place("address.json")
    state = Place("state.json")
    traffic = Place("traffic.json")
    replicas = Place("replicas")

    def replica(self, name: ReplicaName) -> RunLayout:
        return RunLayout(self.replicas / str(name))

    def replica_names(self) -> list[ReplicaName]:
        """All jobs of replicas that there have been, in order. Raises OSError."""
        try:
            names = [entry.name for entry in self.replicas.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(name for name in map(ReplicaName.parse, names) if name is not None)

    @property
    def router(self) -> RunLayout:
        """The run directory of the router's first job."""
        return self.router_generation(1)

    def router_generation(self, number: int) -> RunLayout:
        """The run directory of one job of the router; they follow each other with an overlap."""
        name = "router" if number == 1 else f"router-g{number:03d}"
        return RunLayout(self.directory / name)

    def router_generations(self) -> list[int]:
        """The jobs of the router that there have been, in order. Raises OSError."""
        found = (_ROUTER.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match[1] or 1) for match in found if match is not None)

    @property
    def login_lock(self) -> Path:
        """Held by the router that runs on a login node instead of a job."""
        return self.router.directory / "login.lock"

    tests = Place("tests")

    def create(self) -> None:
        """Make the directory and its fixed sub-directories, private to the user. Raises OSError."""
        self.directory.mkdir(parents=True, mode=0o700)
        for directory in (self.epochs, self.control, self.endpoints, self.replicas, self.tests):
            make_private_directory(directory)
