"""Rehearsals: a small real Megatron run on the sandbox that faults are thrown at.

Two ranks (PP 2 over two nodes, one GPU each), dropout on, so that a resumed run must restore the
random numbers, too. Every rehearsal compares its losses bit by bit with an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.actions.compare import Comparison, compare_runs
from hpctrain.actions.prepare import prepare
from hpctrain.actions.runs import RunFiles, find_run
from hpctrain.actions.state import RunState
from hpctrain.actions.status import RunStatus, statuses
from hpctrain.actions.submit import submit
from hpctrain.sandbox.faults import job_processes
from hpctrain.sandbox.job_processes import JobProcess
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import SandboxShape
from hpctrain.slurm.client import SlurmClient
from hpctrain.store.ledger import Event, EventKind

STEPS = 40
PATIENCE_SECONDS = 240.0

PROFILE = """
name: rehearsal
nodes: {count: 4, cpus: 8, memory: 15GiB}
gpu: {type: a100, per_node: 1, memory: 16GiB, reserved: 0B, peak: {}}
nvlink: {domain: 1, bandwidth: 10GB/s}
network: {fabric: ethernet, nics_per_node: 1, nic_bandwidth: 10Gb/s, interface: lo}
filesystems:
  - {name: disk, path: /tmp, kind: local, write_bandwidth: 1GB/s, read_bandwidth: 1GB/s}
slurm:
  gpu_request: gres
  exclusive: false
  all_memory: false
  kill_wait: 5s
  partitions:
    - {name: train, default: true, preemption: {mode: requeue, grace: 20s}}
    - {name: sudden, preemption: {mode: requeue}}
environment:
  - {name: GLOO_SOCKET_IFNAME, value: lo, reason: all nodes are this machine}
  - {name: OMP_NUM_THREADS, value: "1", reason: ranks share the cores of this machine}
"""

SPEC = f"""
name: rehearsal
model: {{layers: 2, hidden: 64, heads: 4, vocab: 256, seq: 64, dropout: 0.1}}
batch: {{global: 8, micro: 2}}
budget: {{steps: {STEPS}}}
precision: fp32
optimizer: {{lr: 1e-3}}
parallel: {{pp: 2}}
recompute: none
checkpoint: {{every_steps: 10, keep: 3}}
engine: {{deterministic: true}}
resources: {{gpus: 2, walltime: 00:30:00}}
supervise: {{stall: 20s, setup_stall: 45s}}
"""


@contextlib.contextmanager
def own_sandbox(shape: SandboxShape) -> Iterator[Sandbox]:
    """A sandbox that is gone afterwards, whatever happens."""
    # A short name, so that sockets fit into it; pytest's own directories are long.
    parent = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
    box = None
    try:
        box = Sandbox.create(parent / "s", shape)
        box.up()
        yield box
    finally:
        if box is not None:
            box.down()
        shutil.rmtree(parent, ignore_errors=True)


@dataclass
class Rehearsal:
    """One run on a sandbox, and what can be done to it."""

    sandbox: Sandbox
    slurm: SlurmClient
    run: RunFiles
    job_id: int

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

    def logs(self) -> str:
        """Everything that was logged, for the message of a failed assertion."""
        texts = [f"--- {self.run.layout.ledger}\n{self.run.layout.ledger.read_text()}"]
        for path in sorted(self.run.layout.logs.rglob("*")):
            if path.is_file():
                texts.append(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)

    # -- waiting ---------------------------------------------------------------------------

    def wait_until(self, reached: Callable[[RunStatus], bool], what: str) -> RunStatus:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            row = self.status()
            if reached(row):
                return row
            time.sleep(0.2)
        raise AssertionError(f"never {what}: {self.status()}\n{self.logs()}")

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        self.wait_until(
            lambda row: (row.step or 0) >= step and self.attempts >= attempt,
            f"at step {step} of attempt {attempt}",
        )

    def wait_for_checkpoint(self, step: int) -> None:
        self.wait_until(lambda row: (row.checkpoint_step or 0) >= step, f"a checkpoint of {step}")

    def wait_till_over(self) -> RunStatus:
        """The run is over and its job has left the nodes, so that the ledger is complete."""
        self.wait_until(lambda _: self._job_has_ended(), "out of the queue")
        return self.wait_until(lambda row: row.state.over, "over")

    def _job_has_ended(self) -> bool:
        record = self.slurm.show_job(self.job_id)
        return record is None or record.state.is_ended

    # -- hurting ---------------------------------------------------------------------------

    def urgent_job(self, seconds: int = 2) -> None:
        """A job that takes all nodes away."""
        options = "-J urgent -p urgent -N4 --exclusive -t 2 -o /dev/null"
        self.slurm.submit(f"#!/bin/sh\n#SBATCH {options}\nsleep {seconds}\n")

    def processes(self) -> tuple[JobProcess, ...]:
        return job_processes(self.sandbox, str(self.job_id))

    def rank_processes(self, rank: int) -> list[JobProcess]:
        return [process for process in self.processes() if process.rank == rank]

    def kill_rank(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        self.kill(self.rank_processes(rank), signal_number)

    def kill_srun(self) -> None:
        found = self.processes()
        self.kill([p for p in found if os.path.basename(p.command_line[0]) == "srun"])

    def kill_supervisor(self) -> None:
        self.kill([p for p in self.processes() if "hpctrain.supervise" in p.command_line])

    def kill(self, processes: list[JobProcess], signal_number: int = signal.SIGKILL) -> None:
        assert processes, "nobody to kill"
        for process in processes:
            os.kill(process.pid, signal_number)

    # -- judging ---------------------------------------------------------------------------

    def assert_done_exactly(self, reference: RunFiles) -> Comparison:
        """Over, done, and every row of the metrics equals the uninterrupted run's, bit by bit."""
        row = self.wait_till_over()
        assert row.state is RunState.DONE, f"{row}\n{self.logs()}"
        result = compare_runs(reference, self.run)
        assert result.steps_compared == STEPS, self.logs()
        assert result.identical, f"{result.first_difference}\n{self.logs()}"
        return result

    def assert_resumed_from_verified(self) -> None:
        """Each launch has started at the newest checkpoint that the one before had published."""
        starts = self.events(EventKind.RESUME)
        ends = self.events(EventKind.LAUNCH_ENDED)
        for end in ends:
            later = [start for start in starts if start.time > end.time]
            if later:
                assert later[0].resume_step == (end.checkpoint_step or 0)


@dataclass(frozen=True)
class Stage:
    """Where rehearsals are put on: a sandbox, a directory, a profile and a spec."""

    sandbox: Sandbox
    directory: Path

    @property
    def slurm(self) -> SlurmClient:
        return SlurmClient({**os.environ, **self.sandbox.environment()})

    def start(self, *overrides: str) -> Rehearsal:
        """Submit the rehearsal's spec."""
        spec, profile = self.directory / "rehearsal.yaml", self.directory / "profile.yaml"
        spec.write_text(SPEC)
        profile.write_text(PROFILE)
        runs = self.directory / "runs"
        prepared = prepare(spec, str(profile), overrides, runs=runs)
        submitted = submit(prepared, runs, self.slurm)
        run = find_run(runs, submitted.run_id)
        return Rehearsal(self.sandbox, self.slurm, run, submitted.job_id)
