"""Rehearsals: a small real Megatron run on the sandbox that faults are thrown at.

Two ranks (PP 2 over two nodes, one GPU each), dropout on, so that a resumed run must restore the
random numbers, too. Every rehearsal compares its losses bit by bit with an uninterrupted run.
Belongs here: starting, watching and hurting a run. Does not belong here: what is asserted about a
fault (see `faults/findings.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpctrain.base.errors import SlurmError, SlurmUnreachableError
from hpctrain.checkpoints.publish import published_steps
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.job.submit import submit
from hpctrain.records.find import RunFiles, find_run
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.records.run_records import StepMetrics, read_metrics
from hpctrain.runs.bitwise import BitwiseComparison, compare_runs
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus, statuses
from hpctrain.sandbox.daemons import JobProcess
from hpctrain.sandbox.faults import job_processes
from hpctrain.sandbox.repair import repair
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import PartitionShape, SandboxShape, default_shape
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import JobRecord

STEPS = 60
SAVE_EVERY_STEPS = 10
# Two test processes share two cores, and a node that died is missed after tens of seconds.
PATIENCE_SECONDS = 300.0
# What is left for the last words of a supervisor when Slurm ends its job.
KILL_WAIT_SECONDS = 10
FAULTY_TRAINER = Path(__file__).resolve().parent / "faults" / "faulty_trainer.py"
FAULTY_STAND_IN = FAULTY_TRAINER.with_name("faulty_stand_in.py")
# A step of the stand-in: 60 of them last as long as those of the rehearsal's model.
STAND_IN_STEP_SECONDS = 0.04
HELD_RANKS = Path(__file__).resolve().parent / "held_ranks"

PROFILE = """
name: rehearsal
nodes: {{count: 4, cpus: 8, memory: 15GiB}}
gpu: {{type: a100, per_node: {per_node}, memory: 16GiB, reserved: 0B, peak: {{}}, emulated: true}}
nvlink: {{domain: 1, bandwidth: 10GB/s}}
network: {{fabric: ethernet, nics_per_node: 1, nic_bandwidth: 10Gb/s, interface: lo}}
filesystems:
  - {{name: disk, path: /tmp, kind: local, write_bandwidth: 1GB/s, read_bandwidth: 1GB/s}}
slurm:
  gpu_request: gres
  exclusive: false
  memory: none
  kill_wait: {kill_wait}s
  partitions:
    - {{name: train, default: true, preemption: {{mode: requeue, grace: 20s}}}}
    - {{name: brief, preemption: {{mode: requeue, grace: 6s}}}}
    - {{name: sudden, preemption: {{mode: requeue}}}}
software: {software}
continuation: {continuation}
limits: {{poll: 0.1s}}
environment:
  - {{name: GLOO_SOCKET_IFNAME, value: lo, reason: all nodes are this machine}}
  - {{name: OMP_NUM_THREADS, value: "1", reason: ranks share the cores of this machine}}
"""

# All checkpoints are kept: a test that is held up still finds the one that was resumed from.
SPEC = f"""
name: rehearsal
model: {{layers: 2, hidden: 64, heads: 4, vocab: 256, seq: 64, dropout: 0.1}}
batch: {{global: 8, micro: 2}}
budget: {{steps: {STEPS}}}
precision: fp32
optimizer: {{lr: 1e-3}}
parallel: {{pp: 2}}
recompute: none
checkpoint: {{every_steps: {SAVE_EVERY_STEPS}, keep: 20}}
engine: {{deterministic: true}}
resources: {{gpus: 2, walltime: 00:30:00}}
supervise: {{stall: 5min, setup_stall: 5min, learn_stalls: false}}
"""

# A longer run than a trial of the cluster says that it means to train on made-up samples.
MADE_UP = "data.made_up=true"

# The interpreter that the profile names: only the trainer of a rehearsal with planned faults is
# another one; supervisor and probes are what users run. The kernels' logs are files, too. Where the
# test has put a `slow-stat.so`, all processes load it. For the
# processes of a node that is `unmounted` the directory of the data is empty.
_INTERPRETER = """\
#!/bin/sh
export HPCTRAIN_KERNEL_LOG={place}/kernel-{{node}}.log
[ ! -e {place}/slow-stat.so ] || export LD_PRELOAD={place}/slow-stat.so
[ -z {held} ] || export PYTHONPATH={held_ranks} HELD_RANKS={held}
if [ "$2" = hpctrain.train ] && [ {stand_in} ]; then
    shift 2
    set -- {python} {stand_in} {plan} {step_seconds} "$@"
elif [ "$2" = hpctrain.train ] && [ -e {plan} ]; then
    shift 2
    set -- {python} {trainer} {plan} "$@"
else
    set -- {python} "$@"
fi
[ -z {traced} ] || [ "$3" != hpctrain.supervise ] || set -- {strace} "$@"
if [ -e {place}/unmounted-"$SLURMD_NODENAME" ]; then
    exec unshare --map-root-user --mount sh -c 'mount -t tmpfs none "$0" && exec "$@"' {data} "$@"
fi
exec "$@"
"""


def profile_text(
    shape: SandboxShape,
    python: str,
    continuation: str = "requeue",
    gpus_per_node: int = 1,
    software: Mapping[str, object] | None = None,
) -> str:
    """The profile of rehearsals on such a sandbox, with more of `software`."""
    words = {"python": python, **(software or {})}
    return PROFILE.format(
        software=json.dumps(words),
        continuation=continuation,
        per_node=gpus_per_node,
        kill_wait=shape.kill_wait_seconds,
    )


def four_nodes() -> SandboxShape:
    """4 nodes with 2 GPUs; `urgent` preempts `train` (20 s of grace), `brief` (6 s) and `sudden`
    (none)."""
    shape = default_shape(nodes=4, gpus_per_node=2)
    others = (
        PartitionShape("brief", preempt_mode="REQUEUE", grace_seconds=6),
        PartitionShape("sudden", preempt_mode="REQUEUE", grace_seconds=0),
    )
    return replace(
        shape,
        partitions=(*shape.partitions, *others),
        kill_wait_seconds=KILL_WAIT_SECONDS,
    )


_chosen_slurm: Path | None = None


def choose_slurm(directory: Path | None) -> None:
    """All sandboxes from now on have the Slurm that lies there; None is the one of this machine."""
    global _chosen_slurm
    _chosen_slurm = directory and directory.resolve()


def create_sandbox(directory: Path, shape: SandboxShape, slurm: Path | None = None) -> Sandbox:
    """A sandbox with the Slurm that was chosen for all, or with another one."""
    return Sandbox.create(directory, shape, slurm or _chosen_slurm)


@contextlib.contextmanager
def own_sandbox(shape: SandboxShape, slurm: Path | None = None) -> Iterator[Sandbox]:
    """A sandbox that is gone afterwards, whatever happens."""
    # A short name, so that sockets fit into it; pytest's own directories are long.
    parent = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
    box = None
    try:
        box = create_sandbox(parent / "s", shape, slurm)
        box.up(PATIENCE_SECONDS)
        yield box
    finally:
        if box is not None:
            box.down()
        shutil.rmtree(parent, ignore_errors=True)


def patient_client(environment: Mapping[str, str]) -> SlurmClient:
    """A client whose commands may be held up by this machine."""
    return SlurmClient(environment, timeout_seconds=PATIENCE_SECONDS)


def answer(slurm: SlurmClient, job_id: int) -> JobRecord | None:
    """What Slurm says of a job; None also while it does not answer, for a caller that waits."""
    with contextlib.suppress(SlurmUnreachableError):
        return slurm.show_job(job_id)
    return None


def clean(sandbox: Sandbox) -> None:
    """`repair`, again if a daemon was held up for longer than its clients wait."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return repair(sandbox, PATIENCE_SECONDS)
        except SlurmError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)


def wait_till_remembered(sandbox: Sandbox) -> None:
    """Until slurmctld has written its state, which it does 5 s after a change, and can be killed.

    Else it would forget a job and give its number to the next one, which the node that knows the
    first refuses: it is drained, and the next test waits for it in vain.
    """
    name = f"remembered-{time.time_ns()}"
    slurm = patient_client({**os.environ, **sandbox.environment()})
    job_id = slurm.submit("#!/bin/sh\n", ("--hold", f"--job-name={name}")).job_id
    state = sandbox.paths.state / "job_state"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (state.exists() and name.encode() in state.read_bytes()):
        assert time.monotonic() < deadline, "slurmctld does not write its state"
        time.sleep(0.1)
    slurm.cancel(job_id)


@dataclass(frozen=True)
class PlannedFault:
    """What one rank of one launch does to itself; see `faults/faulty_trainer.py`.

    `step` 0 is the start of the process, before torch is imported; otherwise it is done when that
    optimizer step begins.

    """

    epoch: int
    rank: int
    do: str
    step: int = 0
    text: str = ""
    code: int = 1
    samples: int = 0
    seconds: float = 0.0


def held(epoch: int, step: int, rank: int = 1, do: str = "sleep") -> tuple[PlannedFault, ...]:
    """The launch waits at this step, and has published its checkpoints before.

    For tests that do something to a run at its midst: else 60 steps may be over while this machine
    holds up the test. `sleep`: until the rank is killed; `await_warning`: until it is asked to
    leave. Ranks that wait take no part in a save, so it is ended before.
    """
    return (
        PlannedFault(epoch=epoch, rank=-1, step=step, do="settle"),
        PlannedFault(epoch=epoch, rank=rank, step=step, do=do),
    )


def waits_for(word: str, step: int) -> tuple[PlannedFault, ...]:
    """Every launch waits at this step, with its saves ended, until it is asked to leave or the
    test says the word (`Rehearsal.say`)."""
    return (
        PlannedFault(epoch=0, rank=-1, step=step, do="settle"),
        PlannedFault(epoch=0, rank=1, step=step, do="await_word", text=word),
    )


@dataclass
class Rehearsal:
    """One run on a sandbox, and what can be done to it."""

    sandbox: Sandbox
    slurm: SlurmClient
    run: RunFiles
    job_id: int
    place: Path | None = None
    planned: Sequence[PlannedFault] = ()
    judged: list[dict[str, object]] = field(default_factory=list)

    # -- looking ---------------------------------------------------------------------------

    def status(self) -> RunStatus:
        return statuses([self.run], self.slurm)[0]

    def events(self, kind: EventKind) -> list[Event]:
        return [event for event in self.run.ledger.events() if event.event is kind]

    @property
    def causes(self) -> list[str | None]:
        return [event.cause for event in self.events(EventKind.LAUNCH_ENDED)]

    @property
    def attempts(self) -> int:
        return len(self.events(EventKind.ATTEMPT_STARTED))

    @property
    def epoch(self) -> int:
        """The number of the newest launch; 0 before the first."""
        return max((event.epoch or 0 for event in self.events(EventKind.LAUNCH_STARTED)), default=0)

    def rows(self, epoch: int) -> list[StepMetrics]:
        """The steps that one launch has trained."""
        return [row for row in read_metrics(self.run.layout) if row.epoch == epoch]

    def nodes(self, attempt: int = -1) -> list[str]:
        """The nodes of an attempt, the newest by default, in Slurm's order; the batch node is the
        first. As the ledger has them: the job may be in the queue again already."""
        started = self.events(EventKind.ATTEMPT_STARTED)[attempt]
        assert started.nodes, self.logs()
        return list(self.slurm.hostnames(started.nodes))

    def logs(self) -> str:
        """Everything that was logged, for the message of a failed assertion."""
        texts = [f"--- {self.run.layout.ledger}\n{self.run.layout.ledger.read_text()}"]
        for path in sorted(self.run.layout.logs.rglob("*")):
            if path.is_file():
                texts.append(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)

    # -- waiting ---------------------------------------------------------------------------

    def wait(
        self, reached: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS
    ) -> None:
        """For something that the run directory or the machine shows; asks Slurm nothing itself."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"never {what}: {self.status()}\n{self.logs()}"
            time.sleep(0.2)

    def wait_until(
        self,
        reached: Callable[[RunStatus], bool],
        what: str,
        seconds: float = PATIENCE_SECONDS,
    ) -> RunStatus:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(SlurmUnreachableError):  # held up: ask again
                row = self.status()
                if reached(row):
                    return row
            time.sleep(0.5)
        raise AssertionError(f"never {what}: {self.status()}\n{self.logs()}")

    def wait_for_step(self, step: int, epoch: int = 1) -> None:
        """Launch `epoch` or a later one has trained this step.

        If it is planned to be `held` at the next one, its checkpoints are published, too: on a
        loaded machine a save may take longer than the steps behind it.
        """
        settles = any(
            fault.do == "settle" and fault.epoch in (epoch, 0) and fault.step == step + 1
            for fault in self.planned
        )

        def reached() -> bool:
            rows = read_metrics(self.run.layout)
            launches = {row.epoch for row in rows if row.epoch >= epoch and row.step >= step}
            return any(not settles or self._settled(launch, step + 1) for launch in launches)

        self.wait(reached, f"at step {step} of launch {epoch}")

    def _settled(self, epoch: int, step: int) -> bool:
        assert self.place is not None
        return (self.place / f"settled-{epoch}-{step}").exists()

    def wait_for_checkpoint(self, step: int) -> None:
        self.wait(
            lambda: max(published_steps(self.run.layout.checkpoints), default=0) >= step,
            f"a checkpoint of step {step}",
        )

    def wait_for_progress(self) -> int:
        """Until the newest launch has saved and trained on; returns its number."""
        self.wait(lambda: bool(self.events(EventKind.LAUNCH_STARTED)), "launched")
        epoch = self.epoch
        resumed = self.events(EventKind.LAUNCH_STARTED)[-1].resume_step or 0

        def saved_and_trained() -> bool:
            rows = self.rows(epoch)
            newest = max(published_steps(self.run.layout.checkpoints), default=0)
            return newest > resumed and bool(rows) and rows[-1].step > newest

        self.wait(saved_and_trained, f"beyond a new checkpoint in launch {epoch}")
        return epoch

    def wait_till_over(self) -> RunStatus:
        """The run is over and its job has left the nodes, so that the ledger is complete."""
        self.wait_until(lambda _: self._job_has_ended(), "out of the queue")
        return self.wait_until(lambda row: row.state.over, "over")

    def _job_has_ended(self) -> bool:
        with contextlib.suppress(SlurmUnreachableError):
            record = self.slurm.show_job(self.job_id)
            return record is None or record.state.is_ended
        return False

    # -- hurting ---------------------------------------------------------------------------

    def say(self, word: str) -> None:
        """To ranks that wait for it: see `await_word` in `faults/faulty_trainer.py`."""
        assert self.place is not None
        (self.place / f"said-{word}").touch()

    def urgent_job(self, seconds: int = 2, nodes: Sequence[str] = ()) -> None:
        """A job that takes these nodes away, or all four."""
        which = f"-N{len(nodes)} -w {','.join(nodes)}" if nodes else "-N4"
        options = f"-J urgent -p urgent {which} --exclusive -t 20 -o /dev/null"
        self.slurm.submit(f"#!/bin/sh\n#SBATCH {options}\nsleep {seconds}\n")

    def processes(self) -> tuple[JobProcess, ...]:
        return job_processes(self.sandbox, str(self.job_id))

    def rank_processes(self, rank: int) -> list[JobProcess]:
        return [process for process in self.processes() if process.rank == rank]

    def kill_rank(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        self.kill(self.rank_processes(rank), signal_number)

    def kill_srun(self, signal_number: int = signal.SIGKILL) -> None:
        """Both processes of the srun that runs the trainer; not one that probes a node."""
        found = self.processes()
        sruns = [p for p in found if os.path.basename("".join(p.command_line[:1])) == "srun"]
        self.kill([p for p in sruns if "hpctrain.train" in p.command_line], signal_number)

    def kill_supervisor(self, signal_number: int = signal.SIGKILL) -> None:
        supervisors = [p for p in self.processes() if "hpctrain.supervise" in p.command_line]
        self.kill(supervisors, signal_number)

    def kill(self, processes: list[JobProcess], signal_number: int = signal.SIGKILL) -> None:
        assert processes, f"nobody to kill\n{self.logs()}"
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # srun's second process follows the first
                os.kill(process.pid, signal_number)

    # -- judging ---------------------------------------------------------------------------

    def assert_done_exactly(self, reference: RunFiles, steps: int = STEPS) -> BitwiseComparison:
        """Over, done, and every loss and all weights equal the uninterrupted run's, bit by bit."""
        row = self.wait_till_over()
        assert row.state is RunState.DONE, f"{row}\n{self.logs()}"
        result = compare_runs(reference, self.run)
        assert result.steps_compared == steps, self.logs()
        assert not self.differences(reference), f"{self.differences(reference)}\n{self.logs()}"
        for entry in self.judged:
            entry["identical"] = result.steps_compared
        return result

    def differences(self, reference: RunFiles) -> list[str]:
        """What is not the same, bit by bit, in two runs that are over: losses, final weights."""
        result = compare_runs(reference, self.run)
        found = [] if result.identical else [f"losses: {result.first_difference or 'steps'}"]
        if final_weights(self.run) != final_weights(reference):
            found.append("the final weights and optimizer states")
        return found

    def assert_same_so_far(self, reference: RunFiles) -> int:
        """What was trained equals the uninterrupted run; returns the number of steps compared."""
        expected = {row.step: row.loss_hex for row in read_metrics(reference.layout)}
        rows = read_metrics(self.run.layout)
        wrong = [row for row in rows if row.loss_hex != expected[row.step]]
        assert not wrong, f"{wrong[0]}\n{self.logs()}"
        steps = len({row.step for row in rows})
        for entry in self.judged:
            entry["identical"] = steps
        return steps


def final_weights(run: RunFiles) -> dict[str, str]:
    """SHA-256 by shard of the last checkpoint: weights, optimizer state and random numbers.

    The same state gives the same bytes; only `.metadata` and `common.pt` also name the launch.
    """
    directory = run.layout.checkpoints / checkpoint_name(
        published_steps(run.layout.checkpoints)[-1]
    )
    manifest = read_manifest(directory)
    assert manifest is not None, f"no manifest in {directory}"
    shards = {file.name: file.sha256 for file in manifest.files if file.name.endswith(".distcp")}
    assert shards, f"no shards in {directory}"
    return shards


NO_ROOM = "#!/bin/sh\n#SBATCH -p urgent -N4 --exclusive -t 30 -o /dev/null\nexec sleep 1800\n"


@dataclass(frozen=True)
class Stage:
    """Where rehearsals are put on: a sandbox, a directory, a profile and a spec.

    `stand_in`: ranks compute nothing (`tests.rig.stand_in`), and everything else is as it is.
    """

    sandbox: Sandbox
    directory: Path
    stand_in: bool = False

    @property
    def slurm(self) -> SlurmClient:
        return patient_client({**os.environ, **self.sandbox.environment()})

    def at(self, directory: Path) -> Stage:
        """The same in another directory, for a test that wants runs of its own."""
        return replace(self, directory=directory)

    @property
    def runs(self) -> Path:
        return self.directory / "runs"

    @property
    def data(self) -> Path:
        """A directory that every node but an `unmounted` one sees."""
        return self.directory / "data"

    def unmount_data(self, name: str, node: str) -> None:
        """From now on no process of the run `name` on `node` sees what is in `data`."""
        place = self.directory / name
        place.mkdir(exist_ok=True)
        (place / f"unmounted-{node}").touch()

    def mount_data(self, name: str, node: str) -> None:
        """Processes that start from now on see it again."""
        (self.directory / name / f"unmounted-{node}").unlink()

    def start(
        self, *overrides: str, planned: Sequence[PlannedFault] = (), **more: Any
    ) -> Rehearsal:
        """Submit the rehearsal's spec; for `planned` and `more` see `prepared`."""
        prepared, place = self.prepared(*overrides, planned=planned, **more)
        submitted = submit(prepared, self.runs, self.slurm)
        run = find_run(self.runs, submitted.run_id)
        return Rehearsal(self.sandbox, self.slurm, run, submitted.job_id, place, tuple(planned))

    def prepared(
        self,
        *overrides: str,
        planned: Sequence[PlannedFault] = (),
        continuation: str = "requeue",
        gpus_per_node: int = 1,
        held_at: str = "",
        strace: Sequence[str] = (),
        software: Callable[[str], Mapping[str, object]] = lambda _: {},
        profile: Mapping[str, object] | None = None,
    ) -> tuple[Prepared, Path]:
        """Plan the rehearsal's spec; `planned` faults strike inside of the trainer.

        `held_at` (see `held_ranks`) is for trainers that have no `planned` faults. `strace`: the
        words before the command of the supervisor. `software`: further fields of the
        profile's section, by the interpreter; `profile`: further fields of the profile.
        """
        name = next(word for word in overrides if word.startswith("name=")).removeprefix("name=")
        place = self.directory / name
        place.mkdir(exist_ok=True)
        spec, site = place / "rehearsal.yaml", place / "profile.yaml"
        spec.write_text(SPEC)
        python = self._interpreter(place, planned, held_at, strace)
        shape = self.sandbox.shape
        more = software(str(python))
        text = profile_text(shape, str(python), continuation, gpus_per_node, more)
        site.write_text(
            text + "".join(f"{key}: {value}\n" for key, value in (profile or {}).items())
        )
        return prepare(spec, str(site), overrides, runs=self.runs), place

    def fill(self) -> None:
        """All nodes are taken until the test is over: what is submitted then waits."""
        job_id = self.slurm.submit(NO_ROOM).job_id
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ((job := answer(self.slurm, job_id)) and job.state.is_running):
            assert time.monotonic() < deadline, f"never started: {job}"
            time.sleep(0.2)

    def _interpreter(
        self, place: Path, planned: Sequence[PlannedFault], held_at: str, strace: Sequence[str]
    ) -> Path:
        plan, python = place / "faults.json", place / "python"
        if planned:
            plan.write_text(json.dumps([vars(fault) for fault in planned]))
        for node in self.sandbox.shape.node_names:
            (place / f"kernel-{node}.log").touch()
        words = dict(
            place=place, plan=plan, python=sys.executable, trainer=FAULTY_TRAINER, data=self.data
        )
        words |= dict(
            stand_in=FAULTY_STAND_IN if self.stand_in else "", step_seconds=STAND_IN_STEP_SECONDS
        )
        words |= dict(held=held_at, held_ranks=HELD_RANKS, traced="yes" if strace else "")
        quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
        quoted["strace"] = shlex.join(strace)
        text = _INTERPRETER.format(**quoted)
        python.write_text(text)
        python.chmod(0o755)
        return python
