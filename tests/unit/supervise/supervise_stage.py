"""A run directory, a Slurm in memory and an acting `srun`: a whole supervisor without a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from launch_evidence import config

from hpctrain.judge.probe_results import ProbeResult
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind, Ledger
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord, RequeueAnswer, StepRecord
from hpctrain.slurm.states import JobState
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.loop import Supervisor

JOB_ID = 5
PATIENCE_SECONDS = 300.0
ACTOR = Path(__file__).with_name("acting_srun.py")
RUNNING = JobRecord(JOB_ID, state=JobState.RUNNING, reason="None", restart_count=0, requeue=True)


class StageSlurm(FakeSlurm):
    """One running job whose step 0 lives as long as the acting srun."""

    def __init__(self, run: RunLayout) -> None:
        super().__init__()
        self.run = run
        self.records[JOB_ID] = RUNNING
        self.actions_at_requeue: list[list[str | None]] = []

    def steps(self, job_id: int) -> tuple[StepRecord, ...]:
        self._present()
        return (StepRecord("0", JobState.RUNNING),) if self.srun_lives() else ()

    def srun_lives(self) -> bool:
        try:
            pid = int((self.run.directory / "srun.pid").read_text())
            return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            return False

    def signal_step(self, job_id: int, step_id: str, signal_name: str) -> None:
        super().signal_step(job_id, step_id, signal_name)
        if signal_name == "USR2":
            with contextlib.suppress(OSError):
                (self.run.directory / "usr2").touch()
        if signal_name in ("QUIT", "KILL"):
            self.signal_ranks(signal.Signals[f"SIG{signal_name}"])

    def signal_ranks(self, number: signal.Signals) -> None:
        """The processes that an acting srun has started for its ranks."""
        pids = self.run.directory / "ranks.pid"
        for pid in pids.read_text().split() if pids.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def kill_step(self, job_id: int, step_id: str) -> None:
        super().kill_step(job_id, step_id)
        if self.srun_lives():
            os.kill(int((self.run.directory / "srun.pid").read_text()), signal.SIGKILL)

    def requeue(self, job_id: int, *, shielded: bool = False) -> RequeueAnswer:
        events = Ledger(self.run.ledger).events()
        self.actions_at_requeue.append([e.action for e in events if e.event is EventKind.ACTION])
        return super().requeue(job_id, shielded=shielded)

    def change(self, **changes: object) -> None:
        self.records[JOB_ID] = replace(self.records[JOB_ID], **changes)  # type: ignore[arg-type]


class Stage:
    """One run; `play` runs a supervisor to its end."""

    def __init__(self, directory: Path) -> None:
        self.layout = RunLayout(directory / "r1")
        self.layout.create()
        self.slurm = StageSlurm(self.layout)
        self.probe = ProbeResult(trouble="there are no nodes here")
        self.environment = {"SLURM_JOB_NODELIST": "n0"}
        self.training_seen = threading.Event()
        self._closed = threading.Event()
        self._watchers: list[threading.Thread] = []
        self.configure(config())

    def configure(self, settings: SuperviseConfig) -> None:
        self.layout.supervise_config.write_text(settings.model_dump_json())

    def supervisor(
        self, *parts: str, restart_count: int = 0, slurm: SlurmClient | None = None
    ) -> Supervisor:
        argv = [sys.executable, "-I", "-S", str(ACTOR), str(self.layout.directory), *parts]
        environment = {
            "PATH": os.environ["PATH"],
            "SLURM_JOB_ID": str(JOB_ID),
            "SLURM_RESTART_COUNT": str(restart_count),
            "SLURMD_NODENAME": "n0",
            **self.environment,
        }
        client = slurm or cast(SlurmClient, self.slurm)
        return Supervisor(self.layout.directory, argv, environment, client, self.ask_nodes)

    def ask_nodes(self, context: AttemptContext, nodes: Sequence[str], since: float) -> ProbeResult:
        """There are no nodes here; a test says in `probe` what they answer."""
        return replace(self.probe, probed=tuple(nodes))

    def play(self, *parts: str) -> int:
        return self.supervisor(*parts).run()

    def events(self, kind: EventKind) -> list[Event]:
        return [event for event in Ledger(self.layout.ledger).events() if event.event is kind]

    @property
    def causes(self) -> list[str | None]:
        return [event.cause for event in self.events(EventKind.LAUNCH_ENDED)]

    @property
    def actions(self) -> list[str | None]:
        return [event.action for event in self.events(EventKind.ACTION)]

    def once(self, condition: Callable[[], object], act: Callable[[], object]) -> None:
        """Do `act` as soon as `condition` holds, while the supervisor runs."""

        def watch() -> None:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not condition():
                # Late is never: a signal to this process would hit another test.
                if self._closed.wait(0.01) or time.monotonic() > deadline:
                    return
            act()

        self._watchers.append(threading.Thread(target=watch, daemon=True))
        self._watchers[-1].start()

    def once_training(self, act: Callable[[], object]) -> None:
        """Do `act` as soon as the supervisor has seen the first sign of life of a launch."""
        self.once(self.training_seen.is_set, act)

    def close(self) -> None:
        """No thread and no process of a test outlives it."""
        self._closed.set()
        for watcher in self._watchers:
            watcher.join(60)
        self.slurm.signal_ranks(signal.SIGKILL)
        if self.slurm.srun_lives():
            os.kill(int((self.layout.directory / "srun.pid").read_text()), signal.SIGKILL)

    def signal_once_training(self, number: signal.Signals) -> None:
        self.once_training(lambda: os.kill(os.getpid(), number))
