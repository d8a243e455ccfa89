"""Asking nodes by an acting srun that behaves as Slurm 22.05.8 was seen to."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from virtual_clock import VirtualClock
from waiting import wait_until

from hpctrain.base.errors import SlurmUnreachableError
from hpctrain.judge.probe_results import NodeResult, NodeResults, ProbeResult
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord, NodeState
from hpctrain.slurm.states import JobState
from hpctrain.supervise.evidence.probe import (
    STEP_NAME,
    PreflightOptions,
    _Probe,
    _Stragglers,
    probe_nodes,
)

NODES = ("n0", "n1", "n2", "n3")
PROBES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: (given, due)
    for name, given, due in yaml.safe_load(Path(__file__).with_name("probes.yaml").read_text())
}
JOB = JobRecord(5, state=JobState.RUNNING, node_list="n[0-3]", restart_count=0)
# Each node's fate is in a file: ok (also without a file), crashed, hung, begins.
ACTOR = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> calls
env > environment
say() { echo "hpctrain-node {\\"node\\": \\"$2\\", \\"kind\\": \\"$1\\", \\"step\\": \\"3\\"}"; }
fault() {
  echo "hpctrain-node {\\"node\\": \\"$1\\", \\"kind\\": \\"problem\\", \\"check\\": \\"$2\\"," \\
    "\\"text\\": \\"gone\\", \\"hard\\": $3}"
}
for word; do case $word in --nodelist=*) nodes=${word#*=};; esac; done
case $nodes in *,*) [ -e refuses ] && { echo "srun: error: not available" >&2; exit 1; };; esac
[ -e mute ] && { echo "srun: error: no munge" >&2; exit 1; }
code=0
for node in $(echo "$nodes" | tr , ' '); do
  case $(cat "$node" 2>/dev/null) in
    crashed) code=233;;
    hung) hang=1;;
    begins) say begin $node; hang=1;;
    slow) say begin $node; fault $node "run directory" false; say end $node; echo ok > $node;;
    unmounted) say begin $node; fault $node "run directory" false; say end $node;;
    unmounted*) say begin $node; fault $node "run directory" false; say end $node
                echo crashed > $node;;
    broken) say begin $node; fault $node GPUs true; say end $node;;
    *) say begin $node; say end $node;;
  esac
done
[ -e lingers ] && exec sleep 600
[ -n "$hang" ] && { [ -e deaf ] && trap '' TERM; sleep 100 > /dev/null 2>&1 & wait; }
[ $code = 0 ] || echo "srun: error: Task launch failed on node" >&2
exit $code
"""


class Theatre:
    """An acting srun and a Slurm in memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.srun = directory / "srun"
        self.srun.write_text(ACTOR)
        self.srun.chmod(0o755)
        self.slurm = FakeSlurm()
        self.slurm.records[5] = JOB

    def fate(self, **fates: str) -> None:
        for node, fate in fates.items():
            (self.directory / node).write_text(fate)

    def fate_of(self, node: str) -> str:
        path = self.directory / node
        return path.read_text() if path.exists() else ""

    def rule(self, name: str) -> None:
        (self.directory / name).touch()

    def probe(self, deadline_seconds: float = 600.0, **more: object) -> ProbeResult:
        question = PreflightOptions(Path("/some/run"), since=7.0, gpus=8)
        environment = {"PATH": os.environ["PATH"], "SLURM_NTASKS": "64", "MINE": "1"}
        return probe_nodes(
            cast(SlurmClient, self.slurm),
            5,
            NODES,
            question,
            deadline_seconds=deadline_seconds,
            srun=[str(self.srun)],
            environment=environment,
            **more,  # type: ignore[arg-type]
        )

    @property
    def calls(self) -> list[str]:
        path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def asked(self) -> list[str]:
        """The nodes of each srun."""
        return [call.partition("--nodelist=")[2].split()[0] for call in self.calls]


def ended_of(found: dict[str, NodeResult]) -> set[str]:
    return {node for node, one in found.items() if one.ended}


@pytest.fixture
def theatre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Theatre:
    """The deadline of the nodes that do not answer begins when the others have answered."""
    theatre, real = Theatre(tmp_path), _Probe._wait

    def wait(
        self: _Probe,
        processes: Sequence[Any],
        nodes: Sequence[str],
        deadline: float,
        stragglers: _Stragglers | None = None,
    ) -> None:
        left_seconds = deadline - time.monotonic()
        fates = {node: theatre.fate_of(node) for node in nodes}
        if {"hung", "begins"} & {*fates.values()}:
            well = {node for node, fate in fates.items() if fate in ("", "begins")}
            wait_until(lambda: well <= self.answers.begun, "begun")
            quick = {node for node in well if fates[node] != "begins"}
            wait_until(lambda: quick <= ended_of(dict(self.answers.found)), "ended")
        real(self, processes, nodes, time.monotonic() + left_seconds, stragglers)

    monkeypatch.setattr(_Probe, "_wait", wait)
    return theatre


def test_all_answer_to_one_srun(theatre: Theatre) -> None:
    result = theatre.probe()
    assert (result.usable, result.lost, result.trouble) == (NODES, (), "")
    assert result.probed == NODES
    (call,) = theatre.calls
    for word in (
        *("--jobid=5", f"--job-name={STEP_NAME}", "--overlap", "--nodes=4", "--ntasks=4"),
        *("--ntasks-per-node=1", "--nodelist=n0,n1,n2,n3", "--kill-on-bad-exit=0", "--no-kill"),
        *("--chdir=/", "hpctrain.supervise.preflight"),
        *("--run-directory=/some/run", "--since=7.000", "--gpus=8"),
    ):
        assert word in call.split()
    assert f"{sys.executable} -m hpctrain.supervise.preflight" in call


@pytest.mark.parametrize("name", PROBES)
def test_a_probe(theatre: Theatre, name: str) -> None:
    given, due = PROBES[name]
    theatre.fate(**given.get("fates", {}))
    for rule in given.get("rules", ()):
        theatre.rule(rule)
    slurm = theatre.slurm
    slurm.node_words.update(given.get("words", {}))
    slurm.booted.update(given.get("booted", {}))
    slurm.away = given.get("away", False)
    slurm.records[5] = replace(JOB, node_list=given.get("nodes", JOB.node_list))
    if "silent" in given:
        states = {node: NodeState(node, "allocated", node != given["silent"]) for node in NODES}
        slurm.node_states = lambda nodes: states  # type: ignore[method-assign]
    result = theatre.probe(given.get("deadline_seconds", 600.0))
    assert result.seconds < 300
    for field in ("lost", "drained", "leaving"):
        assert getattr(result, field) == tuple(due.get(field, ())), field
    unfit = (*due.get("lost", ()), *due.get("unfit", ()))
    assert result.unfit == unfit
    assert due.get("trouble", "") in result.trouble
    assert bool(result.trouble) is ("trouble" in due)
    if not result.trouble:
        assert result.usable == tuple(node for node in NODES if node not in unfit)
    for found, words in zip(result.why_lost, due.get("why", result.why_lost), strict=True):
        assert found.startswith(words)
    assert set(due.get("problems", ())) <= {*result.problem_lines()}
    if "asked" in due:
        assert theatre.asked == due["asked"]
    killed = [tuple(one) for one in due.get("killed", ())]
    wait_until(lambda: len(slurm.signals) >= len(killed), "killed")
    assert slurm.signals == killed, "steps that ended are not"


def test_options_of_the_jobs_own_srun_do_not_reach_the_probe(theatre: Theatre) -> None:
    theatre.probe()
    names = {line.partition("=")[0] for line in (theatre.directory / "environment").open()}
    assert "MINE" in names and "SLURM_NTASKS" not in names


def test_nobody_waits_for_a_node_that_takes_much_longer_than_the_others(
    theatre: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.supervise.evidence.probe._LATER_SECONDS", 0.5)
    monkeypatch.setattr("hpctrain.supervise.evidence.probe._ALONE_SECONDS", 0.5)
    theatre.fate(n1="hung")
    result = theatre.probe(deadline_seconds=60)
    assert result.lost == ("n1",) and result.seconds < 50


def test_who_is_overdue(virtual_clock: VirtualClock) -> None:
    """Three times as long as the last of the others, and 3 s; only once half have answered."""
    latecomers = _Stragglers(NODES)

    def at(seconds: float, *ended: str) -> bool:
        virtual_clock.advance(seconds - virtual_clock.passed_seconds)
        return latecomers.are_overdue(frozenset(ended))

    assert not at(1, "n0", "elsewhere", "nowhere")
    assert not at(50, "n0")
    assert not at(51, "n0", "n1"), "the second has just answered"
    assert not at(155, "n0", "n1")
    assert at(157, "n0", "n1")
    assert not at(158, "n0", "n1", "n2"), "they still come in"


def test_some_are_asked_at_a_time(theatre: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.supervise.evidence.probe._ALONE_AT_ONCE", 2)
    theatre.rule("refuses")
    assert theatre.probe().usable == NODES


def test_steps_that_ended_are_not_killed(theatre: Theatre) -> None:
    theatre.probe()
    time.sleep(0.1)
    assert theatre.slurm.signals == []


def test_what_slurm_learns_while_nodes_are_asked_counts(theatre: Theatre) -> None:
    theatre.fate(n2="crashed")
    looks = iter(({}, {"n2": 12.0}))
    theatre.slurm.boot_times = lambda nodes: next(looks)  # type: ignore[method-assign]
    result = theatre.probe()
    assert (result.lost, result.why_lost) == (("n2",), ("it has been rebooted",))


def test_without_srun_there_is_trouble(theatre: Theatre) -> None:
    theatre.srun.unlink()
    result = theatre.probe()
    assert "srun could not be run" in result.trouble and result.lost == ()


def test_an_interruption_ends_the_waiting_and_accuses_nobody(
    theatre: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.supervise.evidence.probe._LATER_SECONDS", 60.0)
    theatre.fate(n1="hung")
    started = time.monotonic()
    result = theatre.probe(
        deadline_seconds=90, interrupted=lambda: time.monotonic() > started + 0.5
    )
    assert time.monotonic() - started < 85
    assert result.lost == () and result.trouble


def test_a_controller_that_goes_away_in_between_is_no_error(theatre: Theatre) -> None:
    def gone(nodes: object) -> dict[str, NodeState]:
        raise SlurmUnreachableError("gone")

    theatre.slurm.node_states = gone  # type: ignore[method-assign]
    assert theatre.probe().trouble == "gone"


def test_the_deadline_grows_with_the_job(theatre: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.supervise.evidence.probe._FIRST_SECONDS", 0.2)
    monkeypatch.setattr("hpctrain.supervise.evidence.probe._SECONDS_PER_NODE", 0.2)
    monkeypatch.setattr("hpctrain.supervise.evidence.probe._LATER_SECONDS", 60.0)
    theatre.fate(n1="hung")
    result = theatre.probe(deadline_seconds=cast(float, None))
    assert result.lost == ("n1",)
    assert 2.0 < result.seconds < 60


def test_a_node_may_begin_while_the_ended_ones_are_counted() -> None:
    """Readers of the steps of other nodes run beside."""
    found: dict[str, NodeResult] = {}

    class Counted:
        @property
        def ended(self) -> bool:
            found[f"n{len(found)}"] = NodeResult(f"n{len(found)}")
            return True

    found["n0"] = cast(NodeResult, Counted())
    assert NodeResults(found).ended == {"n0"}
