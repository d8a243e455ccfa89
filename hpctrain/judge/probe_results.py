"""Parse the results of a probe of nodes and compare them. Pure.

Belongs here: parsing the lines of `preflight`, distinguishing a broken node from a broken cluster.
Does not belong here: running the probe (`probe`), the checks (`preflight`), decisions (`policy`).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from hpctrain.judge.blame import is_singular
from hpctrain.judge.documents import UnfitNode
from hpctrain.judge.preflight_format import INPUTS, MARK, RUN_DIRECTORY, SHUTDOWN

# munge refuses credentials at 300 s (munged(8), --max-ttl); a probe itself takes some seconds.
_LARGEST_SKEW_SECONDS = 60.0
_UNFINISHED = "checks"
# A node that fails one of these cannot take part in a launch.
_INDISPENSABLE = frozenset({RUN_DIRECTORY, INPUTS, SHUTDOWN, _UNFINISHED})


@dataclass(frozen=True)
class NodeProblem:
    """A problem that a check has found; `hard`: certainly broken hardware; `gpu`: its UUID."""

    check: str
    text: str
    hard: bool = False
    gpu: str | None = None

    @property
    def blocks(self) -> bool:
        """True if no launch can use the node as it is; with other problems it may."""
        return self.hard or self.check in _INDISPENSABLE

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass(frozen=True)
class KernelLine:
    """A line of a kernel's log; `at` is its time in seconds since the epoch, if it has one."""

    node: str
    text: str
    at: float | None = None


@dataclass(frozen=True)
class NodeResult:
    """The results of all checks of one node. `ended` False: it began and did not end.

    `ports` are its active ports and `gpus` its UUIDs, None where there is nothing to count.
    """

    node: str
    ended: bool = False
    step_id: str = ""
    skew_seconds: float = 0.0
    problems: tuple[NodeProblem, ...] = ()
    kernel: tuple[KernelLine, ...] = ()
    gpus: tuple[str, ...] | None = None
    ports: tuple[str, ...] | None = None
    kernel_log: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """The probed nodes, their results, and the lost nodes.

    `lost` did not answer although others did, are down, or are no longer part of the job;
    `why_lost` has the reason for each, in the same order. `trouble`: why the probe itself failed;
    then no node is lost. `drained`: Slurm takes them out of service after the job. `leaving`: they
    still answer and are being shut down or rebooted.
    """

    probed: tuple[str, ...] = ()
    results: tuple[NodeResult, ...] = ()
    lost: tuple[str, ...] = ()
    why_lost: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    trouble: str = ""
    seconds: float = 0.0

    @property
    def broken(self) -> tuple[NodeResult, ...]:
        """The nodes that answer and have a problem that most others do not have."""
        own = (replace(one, problems=self._own(one)) for one in self.results)
        return tuple(one for one in own if one.problems)

    @property
    def usable(self) -> tuple[str, ...]:
        """The nodes on which a launch can be tried, in the order probed."""
        blocked = {one.node for one in self.broken if any(p.blocks for p in one.problems)}
        answered = {one.node for one in self.results}
        return tuple(node for node in self.probed if node in answered - blocked)

    @property
    def doubtful(self) -> tuple[str, ...]:
        """The usable nodes with a problem, to be avoided if there are enough others."""
        usable = set(self.usable)
        return tuple(one.node for one in self.broken if one.node in usable)

    @property
    def unfit(self) -> tuple[str, ...]:
        """The nodes on which no launch can be tried: lost, or with a problem that blocks.

        Empty if the probe itself failed.
        """
        usable = set(self.usable)
        gone = set(self.lost)
        answered = {one.node for one in self.results}
        return tuple(node for node in self.probed if node in gone | (answered - usable))

    @property
    def unfit_with_reason(self) -> tuple[UnfitNode, ...]:
        """The nodes that answer and have a problem that blocks, with the first such problem."""
        blocking = ((one, [p for p in one.problems if p.blocks]) for one in self.broken)
        return tuple(UnfitNode(one.node, str(faults[0])) for one, faults in blocking if faults)

    @property
    def shared(self) -> tuple[str, ...]:
        """The problems that most nodes have, so that another node would not help."""
        return tuple(dict.fromkeys(map(str, self._shared())))

    @property
    def shared_blocking(self) -> tuple[str, ...]:
        """Those of the shared problems that prevent launches."""
        return tuple(dict.fromkeys(str(problem) for problem in self._shared() if problem.blocks))

    def _shared(self) -> tuple[NodeProblem, ...]:
        return tuple(p for one in self.results for p in one.problems if p not in self._own(one))

    @property
    def kernel_lines(self) -> tuple[KernelLine, ...]:
        return tuple(line for one in self.results for line in one.kernel)

    @property
    def homes(self) -> dict[str, str]:
        """The node of each GPU, by UUID."""
        return {gpu: one.node for one in self.results for gpu in one.gpus or ()}

    def problem_lines(self) -> tuple[str, ...]:
        """List all problems, one line for each node, for the ledger."""
        if self.trouble:
            return (f"nodes could not be probed: {self.trouble}",)
        lost = zip(self.lost, self.why_lost, strict=True)
        return (
            *(f"{node}: {why}" for node, why in lost),
            *(f"{node}: it is being shut down or rebooted" for node in self.leaving),
            *(f"{one.node}: {'; '.join(map(str, one.problems))}" for one in self.broken),
            *(f"on most nodes: {text}" for text in self.shared),
        )

    def _own(self, result: NodeResult) -> tuple[NodeProblem, ...]:
        nodes_by_check = defaultdict(set)
        for one in self.results:
            for problem in one.problems:
                nodes_by_check[problem.check].add(one.node)
        return tuple(
            problem
            for problem in result.problems
            if problem.hard or is_singular(nodes_by_check[problem.check], self.probed)
        )


@dataclass
class NodeResults:
    """Collects the results of all nodes while their lines arrive."""

    found: dict[str, NodeResult] = field(default_factory=dict)

    def add_line(self, line: str, received_at: float) -> None:
        """Parse one line; `received_at` is in seconds since the epoch, by our own clock."""
        _, mark, text = line.partition(MARK)
        try:
            message = json.loads(text) if mark else None
        except ValueError:
            return
        if not isinstance(message, dict) or not isinstance(message.get("node"), str):
            return
        node = message["node"]
        before = self.found.get(node, NodeResult(node))
        self.found[node] = _add_message(before, message, received_at)

    @property
    def begun(self) -> frozenset[str]:
        return frozenset(self.found)

    @property
    def ended(self) -> frozenset[str]:
        # copied, because readers of other steps add nodes meanwhile
        return frozenset(node for node, one in tuple(self.found.items()) if one.ended)

    def compared(self) -> tuple[NodeResult, ...]:
        """List the results with the problems that show only in comparison with other nodes."""
        results = tuple(self.found.values())
        listed = [one.ports for one in results if one.ports is not None]
        counts = Counter(port for ports in listed for port in ports)
        # Ports that are active on more than half of the nodes should be active on all.
        usual = {port for port, count in counts.items() if 2 * count > len(listed)}
        compared = []
        for one in results:
            problems = list(one.problems)
            if not one.ended:
                problems.append(NodeProblem(_UNFINISHED, "began and did not end in time"))
            if abs(one.skew_seconds) > _LARGEST_SKEW_SECONDS:
                text = f"differs by {one.skew_seconds:+.0f} s from that of the first node"
                problems.append(NodeProblem("clock", text))
            missing = sorted(usual - set(one.ports)) if one.ports is not None else []
            if missing:
                text = f"{', '.join(missing)} not active, unlike on the other nodes"
                problems.append(NodeProblem("fabric", text))
            compared.append(replace(one, problems=tuple(problems)))
        return tuple(compared)


def _add_message(before: NodeResult, message: dict[str, Any], received_at: float) -> NodeResult:
    kind, text = message.get("kind"), str(message.get("text", ""))
    if kind == "begin":
        clock = message.get("clock")
        skew_seconds = clock - received_at if isinstance(clock, int | float) else 0.0
        return NodeResult(
            before.node, step_id=str(message.get("step", "")), skew_seconds=skew_seconds
        )
    if kind == "problem":
        hard, gpu = message.get("hard") is True, message.get("gpu")
        problem = NodeProblem(str(message.get("check", "")), text, hard, gpu)
        return replace(before, problems=(*before.problems, problem))
    if kind == "kernel":
        return replace(
            before, kernel=(*before.kernel, KernelLine(before.node, text, message.get("at")))
        )
    if kind == "fact":
        name, value = message.get("name"), message.get("value")
        if name == "gpus" and isinstance(value, list):
            return replace(before, gpus=tuple(map(str, value)))
        if name == "ports" and isinstance(value, list):
            return replace(before, ports=tuple(map(str, value)))
        return replace(before, kernel_log=str(value)) if name == "kernel_log" else before
    return replace(before, ended=True) if kind == "end" else before
