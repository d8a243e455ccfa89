"""The site's commands around the trainer on a real Slurm: on nodes, before ranks, after a kill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from rehearsal import PlannedFault, Rehearsal, Stage, held

from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import read_metrics
from hpctrain.runs.state import RunState
from hpctrain.sandbox.processes import read_environment

pytestmark = pytest.mark.stand_in


def noting(place: Path) -> dict[str, object]:
    """Commands of every kind, each of which adds a line with its node to a file of its own."""
    place.mkdir(exist_ok=True)

    def note(name: str) -> list[str]:
        return ["bash", "-c", f'echo "$$SLURMD_NODENAME" >> {place}/{name}']

    return {
        "job": [note("job")],
        "node": [note("node")],
        "task": [["export", "OF_TASK=$SLURM_PROCID"]],
        "wrapper": ["env", "BOUND=rank$SLURM_PROCID"],
        "node_after": [note("after"), ["bash", "-c", "echo not cleared; exit 3"]],
    }


def start(
    stage: Stage,
    name: str,
    commands: Mapping[str, object],
    *overrides: str,
    planned: tuple[PlannedFault, ...] = (),
) -> Rehearsal:
    return stage.start(
        f"name={name}", *overrides, planned=planned, software=lambda _: {"commands": commands}
    )


def test_commands_around_ranks_of_which_one_is_killed(stage: Stage) -> None:
    place = stage.directory / "noted"
    rehearsal = start(stage, "around", noting(place), planned=held(1, 13))
    rehearsal.wait_for_step(12)
    for rank in (0, 1):
        (process,) = [
            one for one in rehearsal.rank_processes(rank) if "train.json" in one.command_line
        ]
        variables = read_environment(process.pid)
        assert (variables["BOUND"], variables["OF_TASK"]) == (f"rank{rank}", str(rank))
    rehearsal.kill_rank(1)
    assert rehearsal.wait_till_over().state is RunState.DONE, rehearsal.logs()
    assert rehearsal.causes == ["crash", "done"], rehearsal.logs()
    noted = {path.name: sorted(path.read_text().split()) for path in place.iterdir()}
    nodes = sorted(rehearsal.nodes())
    assert noted == {"job": nodes[:1], "node": sorted(2 * nodes), "after": sorted(2 * nodes)}
    observed = [str(event.reason) for event in rehearsal.events(EventKind.OBSERVED)]
    warnings = [one for one in observed if one.startswith("software.commands.node_after on ")]
    assert len(warnings) == 2 and "exit code 3: not cleared" in warnings[0], observed
    assert read_metrics(rehearsal.run.layout)[-1].step == 60


FAILS_ON_N1 = {"node": [["bash", "-c", "echo no domain; test $$SLURMD_NODENAME != n1"]]}


def assert_named(rehearsal: Rehearsal) -> None:
    (ended, _) = rehearsal.events(EventKind.LAUNCH_ENDED)
    assert (ended.cause, ended.node) == ("node_command", "n1"), rehearsal.logs()
    assert str(ended.reason).startswith("software.commands.node on n1 alone: `bash -c echo no ")
    assert str(ended.reason).endswith("exit code 1: no domain")


def test_a_spare_node_takes_over_where_a_command_fails_on_one(stage: Stage) -> None:
    rehearsal = start(stage, "spared", FAILS_ON_N1, "resources.spare_nodes=1")
    assert rehearsal.wait_till_over().state is RunState.DONE, rehearsal.logs()
    assert rehearsal.causes == ["node_command", "done"], rehearsal.logs()
    assert_named(rehearsal)
    (launch,) = rehearsal.events(EventKind.LAUNCH_STARTED)
    assert "n1" not in str(launch.nodes).split(",") and rehearsal.attempts == 1


@pytest.mark.variant("test_a_spare_node_takes_over_where_a_command_fails_on_one")
def test_the_job_goes_elsewhere_where_a_command_fails_on_one(stage: Stage) -> None:
    rehearsal = start(stage, "elsewhere", FAILS_ON_N1)
    assert rehearsal.wait_till_over().state is RunState.DONE, rehearsal.logs()
    assert_named(rehearsal)
    assert "n1" in rehearsal.nodes(0) and "n1" not in rehearsal.nodes(1)


@pytest.mark.variant("test_a_spare_node_takes_over_where_a_command_fails_on_one")
@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        (
            {"node": [["bash", "-c", "echo no domain; exit 3"]]},
            "software.commands.node on all 2 nodes: `bash -c echo no domain; exit 3`: exit code 3: "
            "no domain",
        ),
        ({"job": [["sleep", "60"]], "time_limit": "1s"}, "`sleep 60`: timed out"),
        ({"task": [["cat", "/no/such"]]}, "`cat /no/such` on "),
        ({"wrapper": ["numactl-of-nobody"]}, "`numactl-of-nobody` on "),
    ],
    ids=["node", "job", "task", "wrapper"],
)
def test_what_fails_everywhere_stops_the_run(
    stage: Stage, commands: Mapping[str, object], reason: str
) -> None:
    rehearsal = start(stage, f"stops-{next(iter(commands))}", commands)
    assert rehearsal.wait_till_over().state is RunState.FAILED, rehearsal.logs()
    (ended,) = rehearsal.events(EventKind.LAUNCH_ENDED)
    assert ended.cause == "site_command" and reason in str(ended.reason), rehearsal.logs()
    assert rehearsal.attempts == 1
