"""What a launch says against nodes, and which nodes are left, with a Slurm in memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pytest
from launch_evidence import NOTHING, config

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import Situation, Suspicion, Verdict
from hpctrain.judge.launch_nodes import Allocation
from hpctrain.judge.probe_results import NodeProblem, NodeResult, ProbeResult
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import BufferedLedger, Event, EventKind
from hpctrain.records.node_record import KINDS, EvidenceKind, NodeEvidence, NodeLedger
from hpctrain.records.run_records import Progress
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.supervise.context import AttemptContext, JobAttempt
from hpctrain.supervise.decision_inputs import assess, blame_lost_attempt
from hpctrain.supervise.evidence.slurm_facts import REBOOT_SECONDS, gone_nodes
from hpctrain.supervise.srun_launch import Ended
from hpctrain.supervise.srun_process import Signals

NODES = ("n0", "n1")
K = EvidenceKind


class Site:
    """A job on n0 and n1 of a cluster of four nodes, and a ledger of nodes."""

    def __init__(self, directory: Path) -> None:
        layout = RunLayout(directory / "r1")
        layout.create()
        layout.supervise_config.touch()
        self.slurm = FakeSlurm()
        self.nodes = NodeLedger(directory / "nodes.jsonl")
        layout.supervise_config.write_text("{}")  # by it a run directory is known to be there
        settings = {"node_ledger": str(self.nodes.path), "cluster": "c", "cluster_nodes": 4}
        self.context = AttemptContext(
            run_layout=layout,
            config=config().model_copy(update=settings),
            attempt=JobAttempt(5, 1, "n[0-1]", "n0"),
            ledger=BufferedLedger(layout),
            slurm=cast(SlurmClient, self.slurm),
            signals=Signals(),
        )

    def assess(self, verdict: Verdict, probe: ProbeResult | None = None) -> Situation:
        lost = probe.unfit if probe is not None else ()
        allocation = Allocation(NODES).with_lost(lost).without(verdict.unfit_nodes)
        return assess(self.context, allocation, verdict, Ended(verdict, NOTHING, probe))

    @property
    def evidence(self) -> set[tuple[str, str]]:
        return {(one.node, one.kind) for one in self.nodes.read()}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def verdict(suspicion: Suspicion, cause: Cause = Cause.CRASH) -> Verdict:
    return Verdict(cause, "because", nodes=("n1",), suspicion=suspicion)


@pytest.mark.parametrize(
    ("suspicion", "expected"),
    [
        (Suspicion.NONE, set()),
        (Suspicion.OUTSIDE, {("n1", K.SIGNALLED)}),
        (Suspicion.CAUSE, {("n1", K.FIRST_FAILED), ("n0", K.SHORT_ATTEMPT)}),
    ],
)
def test_what_is_written_down_about_a_crash(
    site: Site, suspicion: Suspicion, expected: set[tuple[str, str]]
) -> None:
    situation = site.assess(verdict(suspicion))
    assert site.evidence == expected
    assert situation.unfit == () and situation.healthy_nodes == 2


def test_a_node_that_lacks_what_others_have_is_unfit(site: Site) -> None:
    situation = site.assess(verdict(Suspicion.UNFIT, Cause.NODE_FAILURE))
    assert site.evidence == {("n1", K.UNHEALTHY)}
    assert (situation.unfit, situation.healthy_nodes) == (("n1",), 1)


def test_a_slow_node_is_left_until_a_day_has_passed(site: Site) -> None:
    """A probe measures no speed: that the node answers does not take back what was measured."""
    object.__setattr__(site.context, "config", site.context.config.model_copy(
        update={"speed_check": "exclude"}
    ))  # fmt: skip
    assert site.assess(verdict(Suspicion.SLOW, Cause.NODE_FAILURE)).unfit == ("n1",)
    assert site.evidence == {("n1", K.SLOW_CHECKED)}
    assert site.assess(verdict(Suspicion.NONE), answers()).unfit == ("n1",)
    object.__setattr__(site.context, "config", site.context.config.model_copy(
        update={"speed_check": "report"}
    ))  # fmt: skip
    assert site.assess(verdict(Suspicion.NONE), answers()).unfit == ()


LACKING = NodeProblem("inputs", "cannot read /data/text.bin")


def answers(*lacking: str) -> ProbeResult:
    told = tuple(NodeResult(n, True, problems=(LACKING,) * (n in lacking)) for n in NODES)
    return ProbeResult(NODES, told)


def test_a_node_stays_unfit_until_it_is_asked_again(site: Site) -> None:
    """The next attempt is elsewhere: nobody has asked n1 since."""
    assert site.assess(verdict(Suspicion.NONE), answers("n1")).unfit == ("n1",)
    assert site.assess(verdict(Suspicion.NONE)).unfit == ("n1",)
    assert site.assess(verdict(Suspicion.NONE), answers()).unfit == ()


def test_no_more_nodes_are_left_than_the_job_can_do_without(site: Site) -> None:
    object.__setattr__(site.context, "config", site.context.config.model_copy(
        update={"cluster_nodes": 2}
    ))  # fmt: skip
    assert site.assess(verdict(Suspicion.UNFIT, Cause.NODE_FAILURE)).unfit == ()


def test_a_node_that_reboots_as_administrators_want_is_not_blamed(site: Site) -> None:
    site.slurm.node_words["n1"] = "reboot^"
    site.assess(verdict(Suspicion.CAUSE, Cause.NODE_FAILURE))
    assert not {kind for node, kind in site.evidence if node == "n1"}
    site.slurm.node_words["n1"] = "down"
    site.assess(verdict(Suspicion.CAUSE, Cause.NODE_FAILURE))
    assert ("n1", K.LOST) in site.evidence


# -- attempts whose supervisor has left no word ------------------------------------------------


def event_of_attempt(site: Site) -> Event:
    site.context.ledger.append(EventKind.ATTEMPT_STARTED, job_id=5, nodes="n[0-1]")
    return site.context.ledger.events()[-1]


def lost_attempt(site: Site, cause: Cause = Cause.NODE_FAILURE) -> tuple[NodeEvidence, ...]:
    event = event_of_attempt(site)
    gone = gone_nodes(site.context, event, site.context.ledger.events())
    blame_lost_attempt(site.context, event, Verdict(cause, "its node was lost"), gone)
    return site.nodes.read()


def test_slurm_says_which_node_an_attempt_was_lost_with(site: Site) -> None:
    site.slurm.node_words["n1"] = "down*"
    (found,) = lost_attempt(site)
    assert (found.node, found.kind, found.weight) == ("n1", K.LOST, 100)


def test_a_batch_node_that_is_back_already_weighs_half(site: Site) -> None:
    (found,) = lost_attempt(site)
    assert (found.node, found.kind, found.weight) == ("n0", K.LOST, KINDS[K.LOST].weight / 2)


@pytest.mark.parametrize(
    ("seconds", "node"),
    [(-REBOOT_SECONDS / 2, "n0"), (60.0, "n1"), (2 * REBOOT_SECONDS, "n0")],
    ids=["booted before", "booted since", "booted much later"],
)
def test_a_node_that_has_booted_since_is_the_one_that_was_lost(
    site: Site, seconds: float, node: str
) -> None:
    site.slurm.booted["n1"] = time.time() + seconds
    (found,) = lost_attempt(site)
    assert found.node == node


def test_the_last_word_is_the_rank_s_or_the_supervisor_s(site: Site) -> None:
    """A node that boots before the attempt's last word was not what it was lost with."""
    started = event_of_attempt(site)
    begun = started.time
    site.slurm.booted["n1"] = begun + 100
    assert gone_nodes(site.context, started) == ("n1",)
    rank = Progress(epoch=1, phase="training", step=7, target_step=9, time=begun + 101)
    site.context.run_layout.progress.write_text(rank.model_dump_json())
    assert gone_nodes(site.context, started) == ()
    site.slurm.booted["n1"] = begun + 102
    assert gone_nodes(site.context, started) == ("n1",)
    term = started.model_copy(update={"event": EventKind.SIGNAL, "time": begun + 103})
    assert gone_nodes(site.context, started, [term]) == ()
    other = term.model_copy(update={"restart_count": 7})
    assert gone_nodes(site.context, started, [other]) == ("n1",)


def test_a_controller_that_has_just_begun_calls_all_nodes_down(site: Site) -> None:
    started = event_of_attempt(site)
    site.slurm.node_words.update(n0="down*", n1="down*")
    assert gone_nodes(site.context, started) == ()
    site.slurm.node_words["n0"] = "allocated"
    assert gone_nodes(site.context, started) == ("n1",)
    long_ago = started.model_copy(update={"time": time.time() - 2 * REBOOT_SECONDS})
    assert gone_nodes(site.context, long_ago) == (), "down for another reason by now"


@pytest.mark.parametrize("word", ["reboot^", "draining", "maint"])
def test_a_planned_reboot_of_the_batch_node_is_no_evidence(site: Site, word: str) -> None:
    site.slurm.node_words["n0"] = word
    assert lost_attempt(site) == ()


def test_other_ends_without_a_word_and_a_silent_slurm_blame_nobody(site: Site) -> None:
    assert lost_attempt(site, Cause.SUPERVISOR_LOST) == ()
    site.slurm.away = True
    assert lost_attempt(site) == ()


def test_evidence_of_before_is_kept(site: Site) -> None:
    old = NodeEvidence(
        time=time.time(), cluster="c", node="n3", kind=K.UNHEALTHY, weight=100, run_id="r1"
    )
    site.nodes.append([old])
    assert site.assess(verdict(Suspicion.NONE)).unfit == ("n3",)


def test_a_list_of_skipped_data_that_cannot_be_extended_is_reported(site: Site) -> None:
    assert site.assess(verdict(Suspicion.NONE)).skip_list_problem == ""
    site.context.run_layout.skips.write_text("[")
    assert "skips.json" in site.assess(verdict(Suspicion.NONE)).skip_list_problem
