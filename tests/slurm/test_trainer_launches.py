"""Each way to start a trainer of one's own, on the real Slurm: killed, preempted, shrunk.

The sandbox's Slurm sends signals to the tasks of a step only, as proctrack/cgroup does, and leaves
what is in sessions of its own alone: whatever Ray leaves behind would be seen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from counting_trainer import STEPS, following
from ray_environment import ray_python
from rehearsal import (
    PATIENCE_SECONDS,
    Rehearsal,
    Stage,
    profile_text,
)

from hpctrain.job.submit import submit
from hpctrain.job.trainer_run import prepare_any
from hpctrain.records.find import find_run
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import lineage, read_metrics
from hpctrain.runs.state import RunState
from hpctrain.sandbox import faults
from hpctrain.sandbox.daemons import JobProcess
from hpctrain.trainer.ray_cluster import ray_directory

TRAINER = Path(__file__).with_name("counting_trainer.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "any-trainer" / "ray_loop.py"

SPEC = """
name: {name}
trainer:
  {command}
  launch: {launch}
  directory: {directory}
  done: {{step: {steps}}}
  checkpoint: {{path: "{path}", complete: {complete}, keep: 20}}
  signal: {{save: TERM, seconds: 1min}}
  metrics: [{{output: 'step (?P<step>\\d+) loss (?P<loss>\\S+)'}}]
  {more}
resources: {{gpus: {gpus}, walltime: 00:30:00{resources}}}
environment: {{variables: {{HELD: "{held}"}}}}
"""

# How a script of its own starts a rank for each GPU of its node.
SELF = """script: |
    for local in 0 1; do
        LOCAL_RANK=$local RANK=$((2 * SLURM_PROCID + local)) WORLD_SIZE=4 \\
            {python} {trainer} "$HPCTRAIN_OUTPUT" $HPCTRAIN_CHECKPOINT &
    done
    wait -n
    wait -n"""


@pytest.fixture
def stage(strict_stage: Stage) -> Stage:
    return strict_stage


def start(
    stage: Stage, name: str, launch: str, command: str, *, gpus_per_node: int = 2, **more: str
) -> Rehearsal:
    """Submit a run on two nodes."""
    place = stage.directory / name
    place.mkdir()
    values: Mapping[str, object] = {
        **dict(
            directory=place,
            steps=STEPS,
            path="step-{step}",
            complete="{each_rank: ['rank-{rank}']}",
        ),
        **dict(more="", resources="", held="", gpus=2 * gpus_per_node),
        **more,
    }
    spec, site = place / "run.yaml", place / "profile.yaml"
    spec.write_text(SPEC.format(name=name, launch=launch, command=command, **values))
    site.write_text(profile_text(stage.sandbox.shape, sys.executable, gpus_per_node=gpus_per_node))
    submitted = submit(prepare_any(spec, str(site), runs=stage.runs), stage.runs, stage.slurm)
    run = find_run(stage.runs, submitted.run_id)
    return Rehearsal(stage.sandbox, stage.slurm, run, submitted.job_id, place)


def counting(python: str = sys.executable) -> str:
    return f'command: ["{python}", -u, "{TRAINER}", "{{output}}", "{{resume}}"]'


def losses(rehearsal: Rehearsal) -> dict[int, float | None]:
    return {row.step: row.exact_loss for row in lineage(read_metrics(rehearsal.run.layout))}


def counted() -> dict[int, float]:
    """The losses of a run that nothing has interrupted."""
    state, found = 1.0, {}
    for step in range(1, STEPS + 1):
        state = found[step] = following(state, step)
    return found


def trainers(rehearsal: Rehearsal, word: str) -> list[JobProcess]:
    return [one for one in rehearsal.processes() if any(word in w for w in one.command_line)]


def assert_same(rehearsal: Rehearsal, causes: list[str], expected: Mapping[int, float]) -> None:
    """The run is done, by launches that ended so, with the losses of an undisturbed one."""
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    assert rehearsal.causes == causes, rehearsal.logs()
    assert losses(rehearsal) == expected, rehearsal.logs()


@pytest.mark.variant("test_a_preempted_trainer_saves_and_goes_on")
@pytest.mark.parametrize("launch", ["self", "accelerate", "torchrun"])
def test_ranks_of_each_launcher_save_when_asked_and_are_started_again(
    stage: Stage, launch: str
) -> None:
    """Four ranks on two nodes: a rank dies in step 13, and Slurm takes the nodes in step 17."""
    command = (
        SELF.format(python=sys.executable, trainer=TRAINER) if launch == "self" else counting()
    )
    rehearsal = start(stage, launch, launch, command, held="1:13,2:17")
    rehearsal.wait_for_step(12)
    rehearsal.wait_for_checkpoint(10)
    victim = next(one for one in trainers(rehearsal, TRAINER.name) if rank_of(one) == 3)
    rehearsal.kill([victim])
    rehearsal.wait_for_step(16, epoch=2)
    rehearsal.urgent_job()
    assert_same(rehearsal, ["crash", "preempted", "done"], counted())
    starts = rehearsal.events(EventKind.LAUNCH_STARTED)
    assert [start.resume_step for start in starts] == [0, 10, 16], "asked, it has saved step 16"
    killed = rehearsal.events(EventKind.LAUNCH_ENDED)[0]
    assert killed.node == rehearsal.nodes(0)[1], rehearsal.logs()


def rank_of(process: JobProcess) -> int | None:
    """The rank that a launcher gave to a process; its own launcher has none."""
    entries = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    found = [entry for entry in entries if entry.startswith(b"RANK=")]
    return int(found[0][5:]) if found else None


@pytest.mark.variant("test_a_run_goes_on_with_fewer_nodes")
def test_an_elastic_trainer_goes_on_with_fewer_nodes(stage: Stage) -> None:
    rehearsal = start(
        stage,
        "elastic",
        "torchrun",
        counting(),
        held="1:13",
        more="elastic: true",
        resources=", min_nodes: 1",
    )
    rehearsal.wait_for_step(12)
    rehearsal.wait_for_checkpoint(10)
    batch_node, other = rehearsal.nodes()
    faults.crash_node(stage.sandbox, other)
    assert_same(rehearsal, ["node_failure", "done"], counted())
    assert rehearsal.attempts == 1, "no queue for a run that may shrink"
    starts = rehearsal.events(EventKind.LAUNCH_STARTED)
    assert [start.launch_nodes for start in starts] == [2, 1], rehearsal.logs()
    assert starts[1].nodes == batch_node
    assert starts[1].resume_step == 10
    assert "rank 1 of 2 begins after step 10" in rehearsal.logs()


# -- Ray ----------------------------------------------------------------------------------------


# The example's driver waits in these steps of its launches, until it is asked to leave or killed.
HOLD = """
        launch = str(int(os.path.basename(output).removeprefix("launch-")))
        held = dict(one.split(":") for one in os.environ["HELD"].split(","))
        while held.get(launch) == str(step + 1) and not asked:
            time.sleep(0.05)
"""


@pytest.mark.nightly("Ray takes ten seconds to start, five times")
def test_ray_is_one_launch(stage: Stage, tmp_path: Path) -> None:
    """Preempted; then a worker node's raylet is killed, then the driver: the same losses."""
    python = ray_python()
    text = EXAMPLE.read_text()
    loop = "    while step < steps:\n"
    assert text.count(loop) == 1
    script = tmp_path / "held_loop.py"
    script.write_text(text.replace(loop, loop + HOLD.lstrip("\n")))
    rehearsal = start(
        stage,
        "ray",
        "ray",
        f'command: ["{python}", "{script}", "{{output}}", "{STEPS}", "{{resume}}"]',
        gpus_per_node=1,
        path="step-{step}.json",
        complete='{json: ["."]}',
        held="1:9,2:14,3:24",
        more="launcher_arguments: [--object-store-memory=100000000]",
    )
    rehearsal.wait_for_step(8)
    rehearsal.urgent_job()
    rehearsal.wait_for_step(13, epoch=2)
    rehearsal.wait_for_checkpoint(10)
    second = rehearsal.nodes()[1]
    raylets = [p for p in trainers(rehearsal, "raylet/raylet") if p.node == second]
    rehearsal.kill(raylets[:1])
    rehearsal.wait_for_step(23, epoch=3)
    rehearsal.wait_for_checkpoint(20)
    drivers = [p for p in trainers(rehearsal, script.name) if parent_is_agent(p)]
    rehearsal.kill(drivers)
    assert_same(rehearsal, ["preempted", "crash", "crash", "done"], undisturbed(tmp_path))
    _, by_raylet, by_driver, _ = rehearsal.events(EventKind.LAUNCH_ENDED)
    assert by_raylet.node == second, rehearsal.logs()
    assert by_raylet.reason is not None and "raylet (killed by signal 9)" in by_raylet.reason
    assert by_driver.rank == 0 and "Killed" in (by_driver.reason or ""), rehearsal.logs()
    starts = rehearsal.events(EventKind.LAUNCH_STARTED)
    assert starts[1].resume_step == 9, "asked, the driver has saved the step that it was in"
    assert "2 nodes" in rehearsal.logs()
    assert left_behind(rehearsal) == []


def parent_is_agent(process: JobProcess) -> bool:
    return "trainer.agent" in Path(f"/proc/{parent_of(process.pid)}/cmdline").read_text()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# What the example needs of Ray, in one process.
NO_RAY = """
class Handle:
    def __init__(self, of):
        self.of = of
    def __getattr__(self, name):
        return Handle(getattr(self.of, name))
    def options(self, **_):
        return self
    def remote(self, *words):
        made = self.of(*words)
        return Handle(made) if isinstance(self.of, type) else made

remote = lambda **_: Handle
init = lambda: None
get = lambda found: found
nodes = lambda: [{"NodeID": "one", "Alive": True}]
"""


def undisturbed(place: Path) -> dict[int, float]:
    """The losses of the example in one process, without Ray and hpctrain."""
    (place / "ray" / "util").mkdir(parents=True)
    (place / "ray" / "__init__.py").write_text(NO_RAY)
    text = "NodeAffinitySchedulingStrategy = lambda *_, **__: None\n"
    (place / "ray" / "util" / "scheduling_strategies.py").write_text(text)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(place), str(STEPS)],
        env={**os.environ, "PYTHONPATH": str(place), "STEP_SECONDS": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def left_behind(rehearsal: Rehearsal) -> list[str]:
    """Processes of the run that are still there, and files of its Ray outside of its directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(rehearsal.run.layout.output).encode() in path.read_bytes():
                found.append(path.with_name("cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    directories = map(ray_directory, rehearsal.run.layout.output.glob("launch-*"))
    return found + [str(path) for path in directories if path.exists()]
