"""The verdict on each way in which a launch can end."""

from __future__ import annotations

import copy
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_evidence import NOTHING, SILENT, End, Story, config, exit_record, exits, told

from hpctrain.judge.causes import FINAL_CAUSES, Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import (
    ActionKind,
    History,
    LaunchEvidence,
    LogFinding,
    OddRank,
    Situation,
    Stall,
    Suspicion,
    UnfitNode,
    Verdict,
)
from hpctrain.judge.job_end import why_ended
from hpctrain.judge.policy import decide
from hpctrain.judge.rank_verdict import Extent, extent
from hpctrain.judge.root_causes import failures_below_agents
from hpctrain.records.run_records import AgentRecord, ExitRecord, RankEnd
from hpctrain.slurm.messages import TaskFailure, read_notice, read_task_failure
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

TABLE = yaml.safe_load((Path(__file__).parent / "verdicts.yaml").read_text())
LINES: dict[str, str] = TABLE["lines"]
ROWS: dict[str, tuple[Any, Any]] = {name: (given, due) for name, given, due in TABLE["launches"]}
USUAL = Verdict(Cause.UNKNOWN, "")
FIELDS = ("cause", "rank", "nodes", "hard", "step", "hold", "already_requeued", "broken_allocation")


def of(name: str, **changes: Any) -> LaunchEvidence:
    return replace(told(copy.deepcopy(ROWS[name][0]), LINES), **changes)


def test_no_launch_is_told_twice() -> None:
    assert len(ROWS) == len(TABLE["launches"])


@pytest.mark.parametrize("name", ROWS)
def test_the_verdict(name: str) -> None:
    due = ROWS[name][1]
    expected = {"cause": due} if isinstance(due, str) else dict(due)
    words = expected.pop("reason", "")
    verdict = classify(of(name))
    expected["nodes"] = tuple(expected.get("nodes", ()))
    usual = {field: getattr(USUAL, field) for field in FIELDS}
    assert {field: getattr(verdict, field) for field in FIELDS} == usual | expected, verdict
    assert verdict.reason and words in verdict.reason and len(verdict.evidence) <= 6


@pytest.mark.parametrize("name", ROWS)
def test_the_order_of_ranks_does_not_matter(name: str) -> None:
    evidence = of(name)
    if any(not exit_.time for exit_ in evidence.rank_exits):
        return  # without times their order is what is known
    first = classify(evidence)
    for seed in range(20):
        generator = random.Random(seed)
        shuffled = replace(
            evidence,
            findings=tuple(generator.sample(evidence.findings, len(evidence.findings))),
            rank_exits=tuple(generator.sample(evidence.rank_exits, len(evidence.rank_exits))),
        )
        verdict = classify(shuffled)
        assert (verdict.cause, verdict.nodes, verdict.hard) == (
            first.cause,
            first.nodes,
            first.hard,
        )


@pytest.mark.parametrize(
    ("name", "last_step", "step"),
    [
        ("diverged", 16, 17),
        ("GPU out of memory", 40, 40),
        ("hang with an odd rank", 41, 41),
        ("an error that nobody knows", 42, 42),
        ("InfiniBand, and nothing else", 43, 43),
    ],
)
def test_the_step(name: str, last_step: int, step: int) -> None:
    assert classify(of(name, last_step=last_step)).step == step


def test_what_a_person_reads() -> None:
    assert "who alone can release it" in classify(of("held by an administrator")).reason
    masked = classify(of("exit code masked by the kill that follows"))
    assert masked.reason == "task 1 on n0: Exited with exit code 3"


def test_causes_of_the_scheduler_are_said_by_the_scheduler() -> None:
    """A site's signature cannot make a crash a preemption, which would cost no budget."""
    odd = LogFinding("site_word", Cause.PREEMPTED, "root", "evicted", rank=0, order=1.0)
    evidence = Story([End(5, "ValueError: x")]).evidence()
    assert classify(replace(evidence, findings=(odd,))).cause is Cause.CRASH


def test_a_silence_of_the_run_directory_explains_a_silence_of_the_ranks() -> None:
    line = "the run directory did not answer for 240 s"
    silent = LogFinding("run_directory_silent", Cause.STORAGE, "cascade", line)
    evidence = replace(NOTHING, stall=Stall("training", 300.0, 90.0), findings=(silent,))
    assert classify(evidence).cause is Cause.STORAGE
    assert classify(replace(evidence, findings=())).cause is Cause.HANG


# -- what is not known -----------------------------------------------------------------------

NOISE = [
    "step 12 loss 3.4",
    "WARNING: deprecated option",
    "some error happened",
    "Traceback (most recent call last):",
    "0x7f1928e6e060: bad things",
    "*** stars ***",
    "Xid of something",
    "srun: warning: nothing",
]


def test_unknown_lines_give_nothing_destructive() -> None:
    for seed in range(300):
        generator = random.Random(seed)
        lines = [generator.choice(NOISE) for _ in range(generator.randrange(6))]
        ends = [End(r, generator.choice(NOISE), r) for r in range(generator.randrange(4))]
        base = generator.choice([NOTHING, SILENT])
        verdict = classify(Story(ends, logs={0: lines, 5: lines}, base=base).evidence())
        assert verdict.cause in (Cause.CRASH, Cause.UNKNOWN), verdict
        assert not verdict.hard and not verdict.hold and verdict.cause not in FINAL_CAUSES


def test_what_could_not_be_read_is_said() -> None:
    line = "3 of 8 logs could not be read in 20 s"
    unread = LogFinding("logs_unread", Cause.UNKNOWN, "advice", line)
    evidence = Story([End(5, "ValueError: x")]).evidence()
    verdict = classify(replace(evidence, findings=(unread,)))
    assert verdict.cause is Cause.CRASH and verdict.evidence[-1] == line
    known = Story([End(5, LINES["cuda_oom"])]).evidence()
    assert line not in classify(replace(known, findings=(*known.findings, unread))).evidence


def test_lines_of_evidence_are_few_and_short() -> None:
    many = tuple(read_notice(f"slurmstepd: error: *** JOB {n} ***") for n in range(20))
    assert len(classify(Story().evidence(srun_exit_code=-9, notices=many)).evidence) == 6
    story = Story([End(r, f"OSError: [Errno 5] {r} " + "x" * 5000, r) for r in range(8)])
    verdict = classify(story.evidence())
    assert 1 <= len(verdict.evidence) <= 6
    assert all(len(line) <= 400 for line in verdict.evidence)


# -- fingerprints ----------------------------------------------------------------------------


def print_of(message: str, rank: int = 5) -> str:
    return classify(Story([End(rank, message)]).evidence()).fingerprint


def test_the_same_failure_has_the_same_fingerprint() -> None:
    one = print_of("ValueError: bad token 17 in /data/shard_3.bin at 0x7f12ab on rank 5", 5)
    other = print_of("ValueError: bad token 934 in /scratch/b/shard_11.bin at 0x99 on rank 1", 1)
    assert one == other and one.startswith("crash: ")
    oom = LINES["cuda_oom"]
    assert print_of(oom, 3) == print_of(oom.replace("2.50", "11.25"), 6) != ""
    others = ("ValueError: a", "ValueError: b", "IndexError: a", LINES["reset"])
    assert len({print_of(text) for text in others}) == 4
    assert classify(of("preemption, said only in the log of a rank")).fingerprint == ""


def test_a_place_of_hanging_is_a_fingerprint() -> None:
    def hung(where: str, silent: float, rank: int = 5) -> str:
        stall = Stall("training", silent, 300.0, (OddRank(rank, f"n{rank}", where),))
        return classify(Story().evidence(stall=stall)).fingerprint

    assert hung("read (data.py:81)", 301) == hung("read (data.py:99)", 555, rank=77)
    assert hung("read (data.py:81)", 301) != hung("all_reduce (dist.py:81)", 301)


# -- what ends a run for good only where all nodes agree, and what is the fault of a few --------

PAIR, FOUR = ("n0", "n1"), ("n0", "n1", "n2", "n3")
MISSING = "/data/text.bin: data file not found"
UNMOUNTED = UnfitNode("n1", "inputs: cannot read /data/text.bin: [Errno 2] No such file")


def missing(rank: int, *, node_dependent: bool = True) -> ExitRecord:
    """Rank i on node ni finds no data."""
    return exit_record(rank, "config_error", MISSING, node_dependent=node_dependent)


def crashed(rank: int, message: str = "connection lost", **fields: Any) -> ExitRecord:
    return exit_record(rank, "crash", message, **fields)


def full(rank: int, *, node_dependent: bool = True) -> ExitRecord:
    words = "OSError: [Errno 28] No space left on device: '/tmp/x'"
    return crashed(rank, words, cause="disk_full", node_dependent=node_dependent)


def replica(rank: int, cause: str = "weights", *, node_dependent: bool = True) -> ExitRecord:
    """Rank i of a replica on node ni has no weights, or no port."""
    return crashed(rank, "it is not there", cause=cause, node_dependent=node_dependent)


def no_container(*ranks: int) -> tuple[LogFinding, ...]:
    line = "FATAL:   stat /data: no such file or directory"
    return tuple(
        LogFinding("container_setting", Cause.LAUNCH_FAILURE, "root", line, rank, f"n{rank}")
        for rank in ranks
    )


def no_command(*ranks: int) -> tuple[LogFinding, ...]:
    line = "3: hpctrain: software.commands.task: `source /sw/x.sh` on n1: exit code 1"
    return tuple(
        LogFinding("site_command", Cause.SITE_COMMAND, "root", line, rank, f"n{rank}")
        for rank in ranks
    )


def launch(*ends: ExitRecord, nodes: tuple[str, ...] = PAIR, **more: Any) -> LaunchEvidence:
    fields = {"rank_exits": ends, "nodes": nodes, "world_size": len(nodes), **more}
    return replace(NOTHING, **fields)


@pytest.mark.parametrize(
    ("affected", "evidence", "expected"),
    [
        (("n0",), launch(missing(0), nodes=("n0",)), Extent.EVERYWHERE),
        (PAIR, launch(missing(0), missing(1)), Extent.EVERYWHERE),
        (("n1",), launch(missing(1)), Extent.FEW),
        (("n1",), launch(crashed(0), missing(1)), Extent.FEW),
        (("n1",), launch(missing(1), nodes=()), Extent.EVERYWHERE),
        (("n1",), launch(crashed(0), missing(1), nodes=()), Extent.FEW),
        # more than half agree, and the rest had no time to report
        (FOUR[1:], launch(*map(missing, (1, 2, 3)), nodes=FOUR), Extent.EVERYWHERE),
        (FOUR[1:], launch(crashed(0), *map(missing, (1, 2, 3)), nodes=FOUR), Extent.MOST),
        # rank 0 reports progress, hence n0 has got further
        (FOUR[1:], launch(*map(missing, (1, 2, 3)), nodes=FOUR, last_step=0), Extent.MOST),
        (FOUR[:2], launch(missing(0), missing(1), nodes=FOUR), Extent.FEW),
    ],
)
def test_how_far_a_failure_reaches(
    affected: tuple[str, ...], evidence: LaunchEvidence, expected: Extent
) -> None:
    assert extent(affected, evidence) is expected


UNFIT = (Cause.NODE_FAILURE, ("n1",))
WRONG, STORAGE, FULL = (Cause.CONFIG_ERROR, ()), (Cause.STORAGE, ()), (Cause.DISK_FULL, ())
AGREEMENTS = {
    "on one node": (launch(missing(1)), UNFIT),
    "others crash": (launch(crashed(0), missing(1)), UNFIT),
    "on all nodes": (launch(missing(0), missing(1)), WRONG),
    "nobody to compare with": (launch(missing(0), nodes=("n0",)), WRONG),
    "a setting, checked by rank 0 alone": (
        launch(missing(0, node_dependent=False), crashed(1)), WRONG),
    "a setting besides": (launch(missing(0, node_dependent=False), missing(1)), WRONG),
    "most nodes, not all": (launch(crashed(0), *map(missing, (1, 2, 3)), nodes=FOUR), STORAGE),
    # rank 0 has looked and told the others
    "all say it, the probe finds one node": (
        launch(missing(0), missing(1), unfit_nodes=(UNMOUNTED,)), UNFIT),
    # only rank 0 looks, and the file is nowhere
    "one says it, the probe finds it on no node": (
        launch(missing(0), common_problems=("inputs: cannot read x",)), WRONG),
    "a spare is unfit": (
        launch(missing(0), missing(1), unfit_nodes=(UnfitNode("n9", "inputs: x"),)), WRONG),
    "no container on one node": (launch(crashed(0), findings=no_container(1)), UNFIT),
    "no container on most nodes": (
        launch(crashed(0), nodes=FOUR, findings=no_container(1, 2, 3)), STORAGE),
    "no container at all": (launch(findings=no_container(0, 1)), WRONG),
    "a rank that prints such a line and trains": (
        launch(crashed(0), crashed(1), findings=no_container(0, 1)),
        (Cause.LAUNCH_FAILURE, PAIR)),
    "a command of the site on one node": (
        launch(crashed(0), findings=no_command(1)), (Cause.NODE_COMMAND, ("n1",))),
    "a command of the site on most nodes": (
        launch(crashed(0), nodes=FOUR, findings=no_command(1, 2, 3)), (Cause.NODE_COMMAND, ())),
    "a command of the site on all nodes": (
        launch(findings=no_command(0, 1)), (Cause.SITE_COMMAND, ())),
    "a disk of one node": (launch(full(1), crashed(0)), UNFIT),
    "disks of all nodes": (launch(full(0), full(1)), FULL),
    "the disk of the checkpoints": (launch(full(1, node_dependent=False), crashed(0)), FULL),
    "weights of one node": (launch(replica(1), crashed(0)), UNFIT),
    "weights of all nodes": (launch(replica(0), replica(1)), (Cause.WEIGHTS, PAIR)),
    "weights that are nowhere": (
        launch(replica(1, node_dependent=False), crashed(0)), (Cause.WEIGHTS, ("n1",))),
    "weights of most nodes": (launch(crashed(0), *map(replica, (1, 2, 3)), nodes=FOUR), STORAGE),
    "ports of one node": (launch(replica(1, "port"), crashed(0)), UNFIT),
    "ports of most nodes": (
        launch(crashed(0), *(replica(n, "port") for n in (1, 2, 3)), nodes=FOUR),
        (Cause.PORT, ())),
    "a port of a trainer": (
        launch(replica(1, "port", node_dependent=False), crashed(0)), (Cause.PORT, ("n1",))),
    "nobody says anything, and a node is unfit": (launch(unfit_nodes=(UNMOUNTED,)), UNFIT),
}  # fmt: skip


@pytest.mark.parametrize("name", AGREEMENTS)
def test_what_all_nodes_agree_on(name: str) -> None:
    evidence, expected = AGREEMENTS[name]
    verdict = classify(evidence)
    assert (verdict.cause, verdict.nodes) == expected
    if verdict.cause is Cause.NODE_FAILURE or expected == (Cause.NODE_COMMAND, ("n1",)):
        assert verdict.suspicion is Suspicion.UNFIT and verdict.unfit_nodes == verdict.nodes
        assert verdict.reason.startswith("on n1 alone: "), verdict.reason
    else:
        assert not verdict.unfit_nodes


@pytest.mark.parametrize(
    ("lines", "cause", "nodes"),
    [
        (["n1: task 1: Exited with exit code 78"], Cause.NODE_FAILURE, ("n1",)),
        (["n0: task 0: Exited with exit code 78"] * 2, Cause.NODE_FAILURE, ("n0",)),
        (["n[0-1]: tasks 0-1: Exited with exit code 78"], Cause.CONFIG_ERROR, ()),
        ([f"n{n}: task {n}: Exited with exit code 78" for n in (1, 0)], Cause.CONFIG_ERROR, ()),
    ],
)
def test_a_trainer_that_can_leave_its_code_only(
    lines: list[str], cause: Cause, nodes: tuple[str, ...]
) -> None:
    """The run directory is away on its node, so there is no record."""
    failures = tuple(read_task_failure(f"srun: error: {line}") for line in lines)
    verdict = classify(launch(task_failures=failures))
    assert (verdict.cause, verdict.nodes) == (cause, nodes)


def test_one_node_is_no_reason_to_stop_and_all_nodes_are() -> None:
    history = History(1, 0, (("node_failure", 1), ("config_error", 1)))
    for name, kind in (("on one node", ActionKind.RELAUNCH), ("on all nodes", ActionKind.STOP)):
        verdict = classify(AGREEMENTS[name][0])
        assert decide(verdict, history, Situation(), config()).kind is kind


def ended(line: str, **more: Any) -> LaunchEvidence:
    failure = read_task_failure(f"srun: error: n1: task 1: {line}")
    return launch(*more.pop("exits", ()), task_failures=(failure,), **more)


@pytest.mark.parametrize(
    ("evidence", "suspicion"),
    [
        # what people and programs do
        (launch(crashed(1, "AttributeError: x"), crashed(0)), Suspicion.NONE),
        (launch(crashed(1, "ValueError: bad batch")), Suspicion.NONE),
        (ended("Killed"), Suspicion.OUTSIDE),
        (ended("Terminated"), Suspicion.OUTSIDE),
        (ended("Interrupt"), Suspicion.OUTSIDE),
        (ended("Segmentation fault (core dumped)"), Suspicion.CAUSE),
        (ended("Bus error"), Suspicion.CAUSE),
        (ended("Aborted (core dumped)"), Suspicion.CAUSE),
        # a rank leaves without a record, the other one only echoes
        *(
            (
                ended(
                    f"Exited with exit code {code}",
                    exits=exits("crash gone"),
                    findings=(LogFinding("peer", Cause.CRASH, "cascade", "crash gone", 0), *said),
                ),
                how,
            )
            for code, said, how in (
                (3, (), Suspicion.CAUSE),
                (137, (), Suspicion.OUTSIDE),
                (143, (), Suspicion.OUTSIDE),
                (139, (), Suspicion.CAUSE),
                (1, (LogFinding("x", Cause.CRASH, "root", "KeyError: 'a'", 1),), Suspicion.NONE),
            )
        ),
    ],
)
def test_what_a_crash_says_against_its_node(evidence: LaunchEvidence, suspicion: Suspicion) -> None:
    verdict = classify(evidence)
    assert (verdict.cause, verdict.nodes) == (Cause.CRASH, ("n1",)), verdict
    assert verdict.suspicion is suspicion, verdict


# -- checkpoints that cannot be loaded ---------------------------------------------------------


def loading(rank: int, message: str, cause: str | None = None, at: int | None = 20) -> ExitRecord:
    return crashed(rank, message, cause=cause, step=20, time=5.0, loading_step=at)


def line_of(signature: str, cause: Cause, line: str, rank: int) -> LogFinding:
    return LogFinding(signature, cause, "root", line, rank, f"n{rank}", 5)


MISMATCH = "RuntimeError: Error(s) in loading state_dict for GPT2LMHeadModel:"
STALE = "OSError: [Errno 116] Stale file handle: '__1_0.distcp'"
OF_CHECKPOINTS = {
    "a rank that fails while loading names the checkpoint": (
        [loading(1, "KeyError: 'optimizer.state'")], {}, (Cause.LOAD_FAILED, 20, 1)),
    "the same failure after loading is a crash": (
        [loading(1, "KeyError: 'optimizer.state'", at=None)], {}, (Cause.CRASH, None, 1)),
    "a mistake met by all ranks while loading is no mistake of the user's": (
        [loading(rank, "TypeError: x") for rank in range(4)],
        {"findings": tuple(
            line_of("python_error", Cause.USER_ERROR, "TypeError: x", rank) for rank in range(4))},
        (Cause.LOAD_FAILED, 20, 0)),
    "a line about loading of a rank that was not loading is a crash": (
        [loading(1, MISMATCH, at=None)],
        {"findings": (line_of("checkpoint_mismatch", Cause.LOAD_FAILED, MISMATCH, 1),)},
        (Cause.CRASH, None, 1)),
    "a line about loading of a rank that was": (
        [loading(1, MISMATCH)],
        {"findings": (line_of("checkpoint_mismatch", Cause.LOAD_FAILED, MISMATCH, 1),)},
        (Cause.LOAD_FAILED, 20, 1)),
    "a storage fault of one node does not name the checkpoint": (
        [loading(1, STALE, at=None)],
        {"findings": (line_of("storage_error", Cause.STORAGE, STALE, 1),)},
        (Cause.STORAGE, None, 1)),
    "nor does one by the rank's own word": (
        [loading(1, "rank 1 on n1 cannot read a shard", "storage", None)],
        {}, (Cause.STORAGE, None, 1)),
    "a rank that was killed may be why others could not load": (
        [loading(1, "RuntimeError: timed out")],
        {"task_failures": (TaskFailure("n0", "0", signal=signal.SIGKILL, at=4.0),)},
        (Cause.CRASH, None, 0)),
    "proof comes before what other ranks say": (
        [loading(1, "KeyError: 'x'"),
         loading(3, "__3_0.distcp has other content than was written", "bad_checkpoint")],
        {}, (Cause.BAD_CHECKPOINT, 20, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_CHECKPOINTS)
def test_whose_fault_a_checkpoint_is_that_cannot_be_loaded(name: str) -> None:
    ends, more, expected = OF_CHECKPOINTS[name]
    verdict = classify(replace(launch(*ends, nodes=(), resume_step=20, **more), world_size=4))
    assert (verdict.cause, verdict.checkpoint_step, verdict.rank) == expected


# -- an end without a word -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "begun", "cause", "words"),
    [
        (JobState.PREEMPTED, True, Cause.PREEMPTED, "preempted"),
        (JobState.NODE_FAIL, True, Cause.NODE_FAILURE, "one of its nodes failed"),
        (JobState.BOOT_FAIL, False, Cause.NODE_FAILURE, "one of its nodes failed"),
        (JobState.TIMEOUT, True, Cause.TIME_LIMIT, "time limit"),
        (JobState.OUT_OF_MEMORY, True, Cause.HOST_OOM, "out of memory"),
        (JobState.CANCELLED, True, Cause.CANCELLED, "cancelled"),
        (JobState.DEADLINE, True, Cause.DEADLINE, "deadline given to sbatch"),
        (JobState.REVOKED, True, Cause.SUPERSEDED, "another cluster"),
        (JobState.FAILED, True, Cause.SUPERVISOR_LOST, "exit code 3"),
        (JobState.FAILED, False, Cause.LAUNCH_FAILURE, "before its supervisor began (exit code 3)"),
        (JobState.COMPLETED, True, Cause.SUPERVISOR_LOST, "exit code 3"),
    ],
)
def test_why_ended(state: JobState, begun: bool, cause: Cause, words: str) -> None:
    found = why_ended(JobRecord(5, state=state, exit_code=3, exit_signal=0), begun=begun)
    assert found is not None and found[0] is cause and words in found[1]


def test_why_ended_says_nothing_about_what_has_not_ended() -> None:
    for state in (JobState.RUNNING, JobState.COMPLETING, JobState.PENDING, JobState.UNKNOWN):
        assert why_ended(JobRecord(5, state=state), begun=True) is None
    assert why_ended(None, begun=True) is None
    killed = why_ended(JobRecord(5, state=JobState.FAILED, exit_signal=9), begun=True)
    assert killed is not None and "signal 9" in killed[1]


# -- what srun says of agents, and what these say of their ranks --------------------------------

T = 1_000_000.0
CODE_1 = "Exited with exit code 1"


def agent(node: str, at: float, *ends: tuple[int, int]) -> AgentRecord:
    found = tuple(RankEnd(rank=rank, code=code) for rank, code in ends)
    return AgentRecord(epoch=1, node=node, time=at, ended=found)


def srun(node: str, task: int, what: str, at: float) -> TaskFailure:
    failure = read_task_failure(f"srun: error: {node}: task {task}: {what}")
    assert failure is not None
    return replace(failure, at=at)


@pytest.mark.parametrize(
    ("records", "said", "expected", "verdict"),
    [
        # a rank was killed, its agent left with 137, the supervisor ended the other
        (
            [agent("n1", T, (9, -9))],
            [srun("n1", 1, "Exited with exit code 137", T + 1), srun("n0", 0, "Killed", T + 9)],
            [("n1", "9", "Killed"), ("n0", "agent", "Killed")],
            ("rank 9 on n1 was ended by a signal: Killed", 9),
        ),
        # a rank crashed and another node followed
        (
            [agent("n0", T, (3, 1)), agent("n1", T + 0.5, (8, 1), (9, -6))],
            [srun("n0", 0, CODE_1, T + 1), srun("n1", 1, CODE_1, T + 1.5)],
            [("n0", "3", CODE_1), ("n1", "8", CODE_1), ("n1", "9", "Aborted")],
            ("task 3 on n0: Exited with exit code 1", None),
        ),
        # an agent was killed, and srun says so after the ranks of another node
        (
            [agent("n0", T, (0, 1))],
            [srun("n1", 1, "Killed", T + 1)],
            [("n1", "agent", "Killed"), ("n0", "0", CODE_1)],
            ("the agent on n1 was ended by a signal: Killed", None),
        ),
        # an agent could not start its ranks
        (
            [],
            [srun("n1", 1, CODE_1, T)],
            [("n1", "agent", CODE_1)],
            ("task agent on n1: Exited with exit code 1", None),
        ),
    ],
)
def test_failures_have_the_numbers_of_ranks(
    records: list[AgentRecord],
    said: list[TaskFailure],
    expected: list[tuple[str, str, str]],
    verdict: tuple[str, int | None],
) -> None:
    found = failures_below_agents(records, said)
    assert [(one.node, one.tasks, one.what) for one in found] == expected
    judged = classify(replace(NOTHING, task_failures=found))
    assert (judged.cause, judged.reason, judged.rank) == (Cause.CRASH, *verdict)


PEER_GONE = "Connection closed by a remote worker"


@pytest.mark.parametrize(
    ("words", "ended", "later", "rank"),
    [
        (PEER_GONE, [(0, 1), (1, -9)], (2, 1), 1),  # both were gone when the agent looked
        (PEER_GONE, [(0, 1)], (1, -9), 1),  # the agent of the killed rank looked later
        (PEER_GONE, [(0, 1)], (1, -6), 0),  # a watchdog that gives up kills nobody else
        ("the loss is a list", [(0, 1), (1, -11)], (2, 1), 0),  # what a crash leaves
    ],
)
def test_a_kill_that_is_told_late_goes_before_what_follows_from_it(
    words: str, ended: list[tuple[int, int]], later: tuple[int, int], rank: int
) -> None:
    failures = failures_below_agents([agent("n0", T, *ended), agent("n1", T + 0.5, later)], ())
    line = f"RuntimeError: {PEER_GONE}"
    echo = LogFinding("peer_gone", Cause.CRASH, "cascade", line, rank=0)
    exit_ = crashed(0, words, node="n0", time=T)
    facts = replace(NOTHING, task_failures=failures, rank_exits=(exit_,), findings=(echo,))
    verdict = classify(facts)
    assert (verdict.cause, verdict.rank) == (Cause.CRASH, rank)
