"""Blame: who is blamed for what, how it fades, and whom a job avoids in the end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hpctrain.judge.blame import (
    EvidenceSource,
    blame,
    blame_problem,
    is_singular,
    most_avoidable,
    nodes_against,
    nodes_to_avoid,
    scores,
    story,
    weight_now,
)
from hpctrain.judge.causes import (
    FINAL_CAUSES,
    MACHINE_CAUSES,
    SCHEDULER_CAUSES,
    Cause,
)
from hpctrain.records.node_record import KINDS, EvidenceKind, NodeEvidence, forgiveness

DAY = 86400.0
NOW = 1_800_000_000.0
JOB = tuple(f"n{number}" for number in range(8))
WITNESS = EvidenceSource(NOW, "c", "run-1", 7)
K = EvidenceKind


def seen(
    kind: EvidenceKind,
    node: str = "n1",
    age_seconds: float = 0.0,
    run: str = "run-1",
    **fields: object,
) -> NodeEvidence:
    told: dict[str, object] = {
        "time": NOW - age_seconds,
        "cluster": "c",
        "node": node,
        "kind": kind,
        "weight": KINDS[kind].weight,
        "run_id": run,
        "reason": "why",
        **fields,
    }
    return NodeEvidence.model_validate(told)


def score(*evidence: NodeEvidence, node: str = "n1") -> float:
    return {one.node: one.score for one in scores(evidence, "c", NOW)}.get(node, 0.0)


# -- who is blamed for what ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "reason", "hard", "kind"),
    [
        ("gpu_error", "XID 79 GPU fell off the bus", True, K.HARDWARE),
        ("crash", "uncorrectable ECC error", True, K.HARDWARE),
        (
            "gpu_error",
            "NVRM: Xid (PCI:0000:3b:00): 94, pid=9, Contained",
            False,
            K.GPU_ERROR_CONTAINED,
        ),
        ("gpu_error", "XID 94 on n1", False, K.GPU_ERROR_CONTAINED),
        ("gpu_error", "NVRM: Xid (PCI:0000:94:00): 31, pid=94", False, K.GPU_ERROR),
        ("gpu_error", "XID 13 on n1", False, K.GPU_ERROR),
        ("gpu_error", "XID 194 on n1", False, K.GPU_ERROR),
        ("node_failure", "Node failure on n1", False, K.LOST),
        ("prolog_failure", "Prolog error", False, K.PROLOG),
        ("hang", "no step for 300 s", False, K.ODD_STACK),
        ("crash", "rank 3 Killed", False, K.FIRST_FAILED),
        ("fabric", "mlx5 link down", False, K.FIRST_FAILED),
        ("storage", "Stale file handle", False, K.FIRST_FAILED),
        ("suspect_numerics", "exit 16", False, K.FIRST_FAILED),
        ("launch_failure", "Task launch failed", False, K.FIRST_FAILED),
    ],
)
def test_suspects_of_a_verdict(cause: str, reason: str, hard: bool, kind: EvidenceKind) -> None:
    (one,) = blame(WITNESS, cause=cause, reason=reason, nodes=["n1"], job_nodes=JOB, hard=hard)
    assert (one.kind, one.node, one.weight) == (kind, "n1", KINDS[kind].weight)
    assert (one.time, one.cluster, one.run_id, one.job_id) == (NOW, "c", "run-1", 7)
    assert one.reason == reason


INNOCENT = [
    *(FINAL_CAUSES | SCHEDULER_CAUSES),
    *(Cause.DONE, Cause.UNKNOWN, Cause.GPU_OOM, Cause.HOST_OOM, Cause.DATA_LOADER, Cause.DIVERGED),
    *(Cause.PORT, Cause.SUPERSEDED, Cause.SUPERVISOR_LOST, Cause.EXTERNAL_SIGNAL),
    *(Cause.LOAD_FAILED, Cause.WEIGHTS, Cause.ENGINE_EXIT, Cause.ENDED_EARLY),
]


@pytest.mark.parametrize("cause", sorted(INNOCENT))
def test_no_node_is_blamed_for_what_no_node_does(cause: str) -> None:
    few = JOB[:2]
    assert not blame(
        WITNESS, cause=str(cause), reason="x", nodes=["n1"], job_nodes=few, short_launch=True
    )


def test_every_cause_that_a_machine_has_is_decided() -> None:
    """A new cause has to be put into the table of blame, or into the list above."""
    blamed = {
        cause
        for cause in Cause
        if blame(WITNESS, cause=str(cause), reason="x", nodes=["n1"], job_nodes=JOB)
    }
    assert blamed == set(Cause) - set(INNOCENT)
    assert blamed - {Cause.CRASH} == MACHINE_CAUSES - {Cause.PORT, Cause.SUPERVISOR_LOST}


def test_lost_nodes_are_blamed_whatever_the_verdict() -> None:
    found = blame(WITNESS, cause="crash", reason="rank 1", nodes=["n1"], job_nodes=JOB, lost=["n2"])
    assert [(one.node, one.kind) for one in found] == [("n2", K.LOST), ("n1", K.FIRST_FAILED)]


def test_a_lost_suspect_is_blamed_once() -> None:
    found = blame(
        WITNESS, cause="node_failure", reason="gone", nodes=["n2"], job_nodes=JOB, lost=["n2"]
    )
    assert [(one.node, one.kind) for one in found] == [("n2", K.LOST)]


def test_when_most_nodes_are_lost_none_of_them_is_to_blame() -> None:
    """A switch, a controller or a file system is."""
    assert not blame(WITNESS, cause="unknown", reason="", nodes=[], job_nodes=JOB, lost=JOB[:5])
    named = blame(WITNESS, cause="node_failure", reason="", nodes=JOB[:5], job_nodes=JOB)
    assert named == ()
    half = blame(WITNESS, cause="unknown", reason="", nodes=[], job_nodes=JOB, lost=JOB[:4])
    assert len(half) == 4


@pytest.mark.parametrize(
    ("some", "nodes", "answer"),
    [(1, 1, True), (1, 2, True), (2, 2, False), (2, 3, False), (2, 4, True), (33, 64, False)],
)
def test_singular(some: int, nodes: int, answer: bool) -> None:
    job = [f"n{number}" for number in range(nodes)]
    assert is_singular(job[:some], job) is answer


@pytest.mark.parametrize(
    ("nodes", "weight"), [(1, 10.0), (4, 2.5), (10, 1.0), (11, None), (64, None)]
)
def test_a_short_launch_smears_small_jobs_only(nodes: int, weight: float | None) -> None:
    job = [f"n{number}" for number in range(nodes)]
    found = blame(WITNESS, cause="crash", reason="x", nodes=[], job_nodes=job, short_launch=True)
    assert {one.kind for one in found} == ({K.SHORT_ATTEMPT} if weight else set())
    assert [one.weight for one in found] == ([weight] * nodes if weight else [])


def test_a_suspect_of_a_short_launch_is_not_smeared_as_well() -> None:
    found = blame(
        WITNESS, cause="crash", reason="x", nodes=["n1"], job_nodes=JOB[:2], short_launch=True
    )
    assert [(one.node, one.kind, one.reason) for one in found] == [
        ("n1", K.FIRST_FAILED, "x"),
        ("n0", K.SHORT_ATTEMPT, "in a launch that failed: x"),
    ]


def test_a_node_list_that_could_not_be_expanded_is_not_blamed() -> None:
    found = blame(
        WITNESS,
        cause="crash",
        reason="x",
        nodes=["n[0-3]", "", "n1", "n1"],
        job_nodes=["n[0-3]"],
        lost=["n[0-3]"],
        short_launch=True,
    )
    assert [one.node for one in found] == ["n1"]


@pytest.mark.parametrize(
    ("hard", "blocks", "kind"),
    [(True, True, K.HARDWARE), (False, True, K.UNHEALTHY), (False, False, K.DOUBTFUL)],
)
def test_failed_checks(hard: bool, blocks: bool, kind: EvidenceKind) -> None:
    one = blame_problem(WITNESS, "n1", "GPUs: x\ny", hard=hard, blocks=blocks, gpu="GPU-1")
    assert (one.kind, one.gpu, one.reason) == (kind, "GPU-1", "GPUs: x y")


# -- how it fades ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "days", "weight"),
    [
        (K.LOST, 0, 100),
        (K.LOST, 0.99, 100),
        (K.LOST, 1, 50),
        (K.LOST, 1.99, 50),
        (K.LOST, 2, 25),
        (K.LOST, 3.9, 12.5),
        (K.LOST, 4, 0),
        (K.LOST, -1, 100),
        (K.HARDWARE, 6.99, 100),
        (K.HARDWARE, 7, 50),
        (K.HARDWARE, 27.9, 12.5),
        (K.HARDWARE, 28, 0),
        (K.GPU_ERROR_CONTAINED, 6.99, 50),
        (K.FIRST_FAILED, 1, 15),
        (K.SLOW, 0, 10),
    ],
)
def test_a_weight_is_halved_after_each_half_life(
    kind: EvidenceKind, days: float, weight: float
) -> None:
    assert weight_now(seen(kind, age_seconds=days * DAY), NOW) == weight


def test_hints_add_up() -> None:
    three = [seen(K.FIRST_FAILED) for _ in range(3)]
    assert score(*three) == 90
    assert score(*three, seen(K.SLOW)) == 100
    assert score(*three, seen(K.SLOW, "n2")) == 90


def test_a_state_that_is_found_again_is_one_piece_of_evidence_per_run_and_gpu() -> None:
    again = [seen(K.DOUBTFUL, age_seconds=age) for age in (30, 20, 10)]
    assert score(*again) == 50
    assert score(*again, seen(K.DOUBTFUL, run="run-2")) == 100
    assert score(*again, seen(K.DOUBTFUL, gpu="GPU-1")) == 100
    slow = seen(K.SLOW)
    (one,) = scores([again[0], slow, again[2]], "c", NOW)
    assert one.evidence == (slow, again[2]), "the newest, oldest first"
    fresh = (seen(K.LOST, age_seconds=1.5 * DAY), seen(K.LOST))
    assert score(*fresh) == 100, "the newest counts"


def test_two_contained_errors_within_a_week_exclude() -> None:
    first = seen(K.GPU_ERROR_CONTAINED, age_seconds=6 * DAY)
    second = seen(K.GPU_ERROR_CONTAINED)
    assert nodes_to_avoid([first], "c", NOW, usable_nodes=64, needed_nodes=8).nodes == ()
    assert nodes_to_avoid([first, second], "c", NOW, usable_nodes=64, needed_nodes=8).nodes == (
        "n1",
    )


def test_forgiving_voids_what_was_before_and_nothing_after() -> None:
    entry = forgiveness(NOW - 10 * DAY, "c", "n1", "alice", "repaired")
    assert score(seen(K.HARDWARE), entry) == 0, "the order counts and not the clock"
    assert score(seen(K.HARDWARE), entry, seen(K.SLOW)) == 10
    assert score(seen(K.HARDWARE, "n2"), entry, node="n2") == 100
    elsewhere = forgiveness(NOW, "other", "n1", "alice", "")
    assert score(seen(K.HARDWARE), elsewhere) == 100


def test_clusters_do_not_mix() -> None:
    assert scores([seen(K.LOST, cluster="other")], "c", NOW) == ()


def test_blame_follows_a_gpu_that_has_moved() -> None:
    found = scores([seen(K.HARDWARE, gpu="GPU-1")], "c", NOW, homes={"GPU-1": "n5"})
    assert [one.node for one in found] == ["n5"]
    found = scores([seen(K.HARDWARE, gpu="GPU-1")], "c", NOW, homes={"GPU-2": "n5"})
    assert [one.node for one in found] == ["n1"]


def test_a_case_in_words() -> None:
    evidence = [
        seen(K.SLOW, reason="slow"),
        seen(K.HARDWARE, reason="XID 79", run="run-2", age_seconds=60),
        seen(K.FIRST_FAILED, reason="rank 3", run="run-2"),
    ]
    (one,) = scores(evidence, "c", NOW)
    assert story(one) == "XID 79, 2 runs, score 140"
    (bare,) = scores([seen(K.LOST, reason="")], "c", NOW)
    assert story(bare) == "did not answer, score 100"


# -- whom a job avoids -----------------------------------------------------------------------


def bad(*nodes: str, extra: int = 0) -> list[NodeEvidence]:
    """Nodes with broken hardware; the first ones are worse by soft evidence."""
    found = []
    for number, node in enumerate(nodes):
        found.append(seen(K.HARDWARE, node))
        found += [seen(K.FIRST_FAILED, node) for _ in range(max(0, extra - number))]
    return found


def avoided(
    evidence: Sequence[NodeEvidence], usable: int, needed: int, allocated: Sequence[str] = ()
) -> tuple[str, ...]:
    return nodes_to_avoid(
        evidence, "c", NOW, usable_nodes=usable, needed_nodes=needed, allocated=allocated
    ).nodes


def test_only_from_a_hundred_on() -> None:
    hints = [seen(K.FIRST_FAILED, "n2") for _ in range(3)]
    assert avoided([*bad("n1"), *hints], 64, 8) == ("n1",)
    assert avoided([*hints, seen(K.SLOW, "n2")], 64, 8) == ("n2",)
    assert avoided([], 64, 8) == ()


@pytest.mark.parametrize(
    ("usable", "needed", "count"),
    [
        (64, 8, 5),
        (64, 60, 4),
        (64, 63, 1),
        (64, 64, 0),
        (64, 70, 0),
        (20, 2, 2),
        (8, 2, 2),
        (0, 8, 2),
    ],
    ids=["all", "room for 4", "room for 1", "no room", "impossible", "a tenth", "two", "unknown"],
)
def test_the_cap(usable: int, needed: int, count: int) -> None:
    nodes = ("a", "b", "c", "d", "e")
    assert avoided(bad(*nodes, extra=5), usable, needed) == nodes[:count]


def test_what_is_dropped_is_said() -> None:
    some = nodes_to_avoid(bad("a", "b", "c", extra=3), "c", NOW, usable_nodes=10, needed_nodes=8)
    assert (some.nodes, some.dropped) == (("a", "b"), ("c",))
    assert some.why.startswith("a: why, score 190; b: why, score 160; c as well, but")
    none = nodes_to_avoid(bad("a", "b"), "c", NOW, usable_nodes=8, needed_nodes=8)
    assert (none.nodes, none.here, none.dropped) == ((), (), ("a", "b"))
    assert none.why == "a, b would be avoided, but the job needs 8 of 8 nodes"


def test_nodes_of_the_job_come_first_among_equals_and_are_named() -> None:
    avoid = nodes_to_avoid(
        bad("a", "b", "z"), "c", NOW, usable_nodes=20, needed_nodes=2, allocated=["y", "z"]
    )
    assert (avoid.nodes, avoid.here) == (("z", "a"), ("z",))


def test_a_cap_may_be_given() -> None:
    avoid = nodes_to_avoid(
        bad("a", "b", "z"), "c", NOW, usable_nodes=100, needed_nodes=2, cap=1, allocated=["z"]
    )
    assert (avoid.nodes, avoid.dropped) == (("z",), ("a", "b"))


def test_whatever_is_in_the_ledger_the_job_can_start() -> None:
    """Random ledgers: never more than the cap, never unschedulable, the worst are kept."""
    dice = random.Random(20261121)
    kinds = [kind for kind in EvidenceKind]
    for _ in range(400):
        usable = dice.randrange(1, 200)
        needed = dice.randrange(1, usable + 10)
        nodes = [f"n{number}" for number in range(usable)]
        evidence = [
            seen(
                dice.choice(kinds),
                dice.choice(nodes[:30]),
                dice.uniform(-1, 40) * DAY,
                f"r{dice.randrange(4)}",
            )
            for _ in range(dice.randrange(150))
        ]
        allocated = dice.sample(nodes, min(needed, usable))
        avoid = nodes_to_avoid(
            evidence, "c", NOW, usable_nodes=usable, needed_nodes=needed, allocated=allocated
        )
        table = {one.node: one.score for one in scores(evidence, "c", NOW)}
        assert len(avoid.nodes) <= max(2, usable // 10)
        assert not avoid.nodes or usable - len(avoid.nodes) >= needed
        assert all(table[node] >= 100 for node in (*avoid.nodes, *avoid.dropped))
        left = {node for node, total in table.items() if total >= 100}
        assert left == {*avoid.nodes, *avoid.dropped}
        assert set(avoid.here) == set(avoid.nodes) & set(allocated)
        if avoid.nodes and avoid.dropped:
            least = min(table[node] for node in avoid.nodes)
            assert least >= max(table[node] for node in avoid.dropped)
        assert bool(avoid.why) == bool(left)


def test_more_evidence_never_clears_a_node() -> None:
    dice = random.Random(7)
    kinds = [kind for kind in EvidenceKind if kind is not EvidenceKind.FORGIVEN]
    for _ in range(200):
        evidence = [
            seen(dice.choice(kinds), age_seconds=dice.uniform(0, 9) * DAY) for _ in range(8)
        ]
        evidence.sort(key=lambda one: one.time)
        before = score(*evidence)
        assert score(*evidence, seen(dice.choice(kinds))) >= before


# -- what suffices for the administrators ------------------------------------------------------


def proven(*evidence: NodeEvidence) -> tuple[bool, bool]:
    """Whether `n1` is to be avoided, and whether an administrator is to be told."""
    (one,) = scores(evidence, "c", NOW)
    return one.is_bad, one.is_proven


@pytest.mark.parametrize(
    ("name", "evidence", "expected"),
    [
        ("hardware", [seen(K.HARDWARE)], (True, True)),
        ("no answer", [seen(K.LOST)], (True, True)),
        ("lacks what others have", [seen(K.UNHEALTHY)], (True, True)),
        ("contained errors, twice", [seen(K.GPU_ERROR_CONTAINED)] * 2, (True, True)),
        ("one program, again and again", [seen(K.FIRST_FAILED)] * 5, (True, False)),
        (
            "runs of one program",
            [seen(K.FIRST_FAILED, run=f"big-00{number}f") for number in range(5)],
            (True, False),
        ),
        (
            "its GPU errors, too",
            [seen(K.GPU_ERROR, run=f"big-00{number}f") for number in range(3)],
            (True, False),
        ),
        (
            "four programs",
            [seen(K.FIRST_FAILED, run=f"{name}-00ff") for name in ("a", "b", "c", "d")],
            (True, True),
        ),
        (
            "a check and one program",
            [seen(K.DOUBTFUL), seen(K.GPU_ERROR, run="a-00ff")],
            (True, True),
        ),
        (
            "kills by a person in many runs of a program",
            [seen(K.SIGNALLED, run=f"big-{number:04x}") for number in range(20)],
            (True, False),
        ),
        ("kills in one run", [seen(K.SIGNALLED)] * 20, (False, False)),
    ],
)
def test_a_word_to_the_administrators_needs_machines_or_several_programs(
    name: str, evidence: list[NodeEvidence], expected: tuple[bool, bool]
) -> None:
    assert proven(*evidence) == expected, name


def test_nodes_that_administrators_have_taken_out_are_not_blamed_for_being_lost() -> None:
    for cause, told in (("node_failure", {"nodes": ["n1"]}), ("crash", {"nodes": []})):
        found = blame(
            WITNESS,
            cause=cause,
            reason="rebooted",
            job_nodes=JOB,
            lost=["n1"] if cause == "crash" else (),
            planned=["n1"],
            short_launch=True,
            **told,
        )
        assert not [one for one in found if one.node == "n1"], found
    broken = blame(
        WITNESS,
        cause="gpu_error",
        reason="XID 79",
        nodes=["n1"],
        job_nodes=JOB,
        hard=True,
        planned=["n1"],
    )
    assert [one.kind for one in broken] == [K.HARDWARE], "what is broken is, whoever drains it"


def test_the_kind_may_be_another_than_that_of_the_cause() -> None:
    killed = blame(
        WITNESS, cause="crash", reason="Killed", nodes=["n1"], job_nodes=JOB, kind=K.SIGNALLED
    )
    assert [(one.node, one.kind, one.weight) for one in killed] == [("n1", K.SIGNALLED, 10)]


def test_nodes_unfit_for_a_run_are_so_for_a_day_and_for_that_run() -> None:
    found = [
        seen(K.UNHEALTHY, "n1"),
        seen(K.UNHEALTHY, "n2", run="another-00ff"),
        seen(K.UNHEALTHY, "n3", age_seconds=DAY + 1),
        seen(K.LOST, "n4"),
        seen(K.UNHEALTHY, "n5"),
        forgiveness(NOW, "c", "n5", "ann", "mounted again"),
    ]
    assert nodes_against(found, "c", "run-1", NOW, EvidenceKind.UNHEALTHY) == ("n1",)
    assert nodes_against(found, "other", "run-1", NOW, EvidenceKind.UNHEALTHY) == ()


@pytest.mark.parametrize(
    ("usable", "needed", "most"), [(0, 4, 2), (4, 2, 2), (4, 4, 0), (100, 50, 10), (3, 9, 0)]
)
def test_how_many_nodes_a_job_may_avoid(usable: int, needed: int, most: int) -> None:
    assert most_avoidable(usable, needed) == most
