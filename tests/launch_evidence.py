"""What a launch may leave behind, told in few words, for tests of the judge and the supervisor.

A launch is told by the lines that it leaves (`Story`), in Python or as a row of a YAML table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpctrain.judge.catalogue import load_signatures
from hpctrain.judge.documents import JobFacts, LaunchEvidence, LogFinding, OddRank, Stall
from hpctrain.records.run_records import ExitRecord
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.slurm.messages import read_notice, read_task_failure
from hpctrain.slurm.states import JobState
from hpctrain.supervise.evidence.log_scan import Scanner

SCANNER = Scanner(load_signatures())
BEGIN = 1_790_000_000.0
RANKS_PER_NODE = 2
NOTHING = LaunchEvidence(
    srun_exit_code=1,
    job=JobFacts(JobState.RUNNING, "None", 0, preempt_time=False),
    started=True,
)
SILENT = replace(NOTHING, job=None)


def job(
    state: str = "RUNNING", reason: str = "None", restarts: int = 0, *, preempt: bool = False
) -> JobFacts:
    return JobFacts(JobState(state), reason, restarts, preempt)


def exit_record(rank: int, outcome: str, message: str, **fields: Any) -> ExitRecord:
    """The record of a rank on node n<rank>, of no known time."""
    return ExitRecord(
        **{
            "epoch": 1,
            "rank": rank,
            "node": f"n{rank}",
            "outcome": outcome,
            "step": 0,
            "exit_code": 1,
            "time": 0.0,
            "message": message,
            **fields,
        }
    )


def exits(*words: str) -> tuple[ExitRecord, ...]:
    """`outcome message` per rank, in the order of their ends; rank i is on node n<i // 2>."""
    pairs = (word.partition(" ") for word in words)
    return tuple(
        exit_record(rank, outcome, message, node=f"n{rank // 2}")
        for rank, (outcome, _, message) in enumerate(pairs)
    )


def config(
    continuation: Literal["requeue", "none"] = "requeue", failures_without_progress: int = 3
) -> SuperviseConfig:
    return SuperviseConfig(
        run_id="r1",
        target_step=100,
        continuation=continuation,
        failures_without_progress=failures_without_progress,
        stall_seconds=60,
        setup_stall_seconds=600,
        kill_wait_seconds=3,
        verify="sha256",
    )


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
        ended = {end.rank: BEGIN + end.after for end in self.ends}
        failures = [failure for line in self.srun if (failure := read_task_failure(line))]
        unlike_tasks = (line for line in self.srun if not read_task_failure(line))
        notices = [notice for line in unlike_tasks if (notice := read_notice(line))]

        def of_rank(rank: int, lines: Sequence[str]) -> tuple[LogFinding, ...]:
            at = ended.get(rank, BEGIN + 150)
            return SCANNER.lines(lines, "rank", rank=rank, node=f"n{rank // 2}", at=at)

        found = (
            *(of_rank(end.rank, [end.message]) for end in self.ends),
            *(of_rank(rank, lines) for rank, lines in self.logs.items()),
            *(
                SCANNER.lines([line], "kernel", node=node, at=BEGIN + after)
                for node, lines in self.kernels.items()
                for after, line in lines
            ),
            SCANNER.lines([notice.text for notice in notices], "srun", at=BEGIN + 200),
        )
        evidence = replace(
            self.base,
            rank_exits=tuple(
                exit_record(
                    end.rank,
                    end.outcome,
                    end.message,
                    node=f"n{end.rank // RANKS_PER_NODE}",
                    cause=end.cause,
                    step=end.step,
                    time=ended[end.rank],
                )
                for end in sorted(self.ends, key=lambda end: end.after)
            ),
            task_failures=tuple(failures),
            notices=tuple(notices),
            findings=tuple(finding for findings in found for finding in findings),
            world_size=self.world_size,
        )
        return replace(evidence, **changes)  # type: ignore[arg-type]


def told(row: Mapping[str, Any], lines: Mapping[str, str]) -> LaunchEvidence:
    """Read a row of a table: the parts of a `Story`, and other fields of the evidence.

    `$name` stands for one of `lines`, and `{rank}` for the rank that prints a line. `ends` are
    [rank or ranks, message, seconds] or the fields of an `End`. `resets` and `timeouts` are ranks
    that only report their peers; `exits` are words without a time, as for `exits`. A line of `srun`
    is an error of srun unless it says who prints it.
    """
    given = dict(row)

    def text(words: str, rank: object = "") -> str:
        known = lines[words[1:]] if words.startswith("$") else words
        return known.replace("{rank}", str(rank))

    ends = []
    for one in given.pop("ends", ()):
        if isinstance(one, dict):
            ends.append(End(**{**one, "message": text(one.get("message", ""))}))
        elif isinstance(one[0], list):
            after = one[2] if len(one) > 2 else 100.0
            ends += [End(rank, text(one[1], rank), after + rank / 100) for rank in one[0]]
        else:
            ends.append(End(one[0], text(one[1], one[0]), *one[2:]))
    after = given.pop("resets_after", 103.0)
    ends += [End(rank, text("$reset"), after + rank / 100) for rank in given.pop("resets", ())]
    logs = {rank: ["$nccl_timeout"] for rank in given.pop("timeouts", ())} | given.pop("logs", {})
    story = Story(
        ends,
        {rank: [text(line, rank) for line in own] for rank, own in logs.items()},
        {
            node: [(at, text(line)) for at, line in own]
            for node, own in given.pop("kernels", {}).items()
        },
        [
            line if line.startswith(("srun:", "slurmstepd:")) else f"srun: error: {line}"
            for line in map(text, given.pop("srun", ()))
        ],
        world_size=given.pop("world_size", 8),
    )
    if "exits" in given:
        given["rank_exits"] = exits(*map(text, given.pop("exits")))
    if "job" in given and given["job"] is not None:
        state = given["job"]
        given["job"] = job(**state) if isinstance(state, dict) else job(state)
    if (silence := given.pop("stall", None)) is not None:
        odd = tuple(OddRank(*one) for one in silence.pop("odd", ()))
        seconds = silence.pop("seconds", 301.0)
        given["stall"] = Stall(silence.pop("phase", "training"), seconds, 300.0, odd)
    return story.evidence(
        **{name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}
    )
