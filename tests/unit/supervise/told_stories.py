"""Launches told by the lines that they leave, for the tests of verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from supervise_facts import NOTHING, exit_record

from hpctrain.judge.catalogue import load_signatures
from hpctrain.judge.documents import LaunchEvidence, LogFinding
from hpctrain.slurm.messages import read_notice, read_task_failure
from hpctrain.supervise.evidence.log_scan import Scanner

SCANNER = Scanner(load_signatures())
BEGIN = 1_790_000_000.0
RANKS_PER_NODE = 2


def node_of(rank: int) -> str:
    return f"n{rank // RANKS_PER_NODE}"


@dataclass(frozen=True)
class End:
    """How a rank ended; `after` is in seconds since the launch began."""

    rank: int
    message: str
    after: float = 100.0
    outcome: str = "crash"
    cause: str | None = None
    step: int = 0


@dataclass(frozen=True)
class Story:
    """What is seen of one launch. `logs` by rank, `kernels` by node: (seconds, line)."""

    ends: Sequence[End] = ()
    logs: Mapping[int, Sequence[str]] = field(default_factory=dict)
    kernels: Mapping[str, Sequence[tuple[float, str]]] = field(default_factory=dict)
    srun: Sequence[str] = ()
    base: LaunchEvidence = NOTHING
    world_size: int = 8

    def evidence(self, **changes: object) -> LaunchEvidence:
        """As `gather` and `find_lines` make it."""
        ends = sorted(self.ends, key=lambda end: end.after)
        failures = tuple(f for line in self.srun if (f := read_task_failure(line)) is not None)
        unlike_tasks = (line for line in self.srun if not read_task_failure(line))
        notices = tuple(n for line in unlike_tasks if (n := read_notice(line)) is not None)
        evidence = replace(
            self.base,
            rank_exits=tuple(
                exit_record(
                    end.rank,
                    end.outcome,
                    end.message,
                    node=node_of(end.rank),
                    cause=end.cause,
                    step=end.step,
                    time=BEGIN + end.after,
                )
                for end in ends
            ),
            task_failures=failures,
            notices=notices,
            findings=self._findings([notice.text for notice in notices]),
            world_size=self.world_size,
        )
        return replace(evidence, **changes)  # type: ignore[arg-type]

    def _findings(self, notices: Sequence[str]) -> tuple[LogFinding, ...]:
        ended = {end.rank: BEGIN + end.after for end in self.ends}
        found = [
            *(self._of_rank(end.rank, [end.message], ended) for end in self.ends),
            *(self._of_rank(rank, lines, ended) for rank, lines in self.logs.items()),
            *(
                SCANNER.lines([line], "kernel", node=node, at=BEGIN + after)
                for node, lines in self.kernels.items()
                for after, line in lines
            ),
            SCANNER.lines(notices, "srun", at=BEGIN + 200),
        ]
        return tuple(one for findings in found for one in findings)

    def _of_rank(
        self, rank: int, lines: Sequence[str], ended: Mapping[int, float]
    ) -> tuple[LogFinding, ...]:
        at = ended.get(rank, BEGIN + 150)
        return SCANNER.lines(lines, "rank", rank=rank, node=node_of(rank), at=at)
