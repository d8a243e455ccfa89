"""Launches of an agent with a small trainer, as real processes without Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from waiting import wait_until

from hpctrain.checkpoints.publish import published_steps
from hpctrain.engines.trainer import TrainerSettings
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.exit_records import read_exit_records
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import Manifest, checkpoint_name, read_manifest
from hpctrain.records.run_records import ExitRecord, StepMetrics, read_metrics
from hpctrain.train.launchers.agent_ranks import die_with_parent
from hpctrain.trainer import YIELDED

TINY = Path(__file__).with_name("misbehaving_trainer.py")
STEP_LOSS = r"step (?P<step>\d+) loss (?P<loss>\S+)"
_PATIENCE_SECONDS = 120.0
# The agent, to which a trainer that has ended is done writing after one second instead of five.
AGENT = """
import runpy
from hpctrain.trainer import publishing
assert publishing._QUIET_SECONDS
publishing._QUIET_SECONDS = 1.0
runpy.run_module("hpctrain.trainer.agent", run_name="__main__", alter_sys=True)
"""
TRAINER: dict[str, object] = {
    "checkpoint": {"path": "step-{step}", "complete": {"json": ["state.json"]}, "keep": 9},
    "signal": {"save": "TERM", "seconds": "60s"},
    "metrics": [{"output": STEP_LOSS}],
    "done": {"step": 20},
}


@dataclass
class AgentLaunch:
    """One agent and what it has started."""

    run: RunLayout
    epoch: int
    process: subprocess.Popen[str]
    printed: str = field(default="")

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""
        self.printed = self.process.communicate(timeout=_PATIENCE_SECONDS)[0]
        return self.process.returncode

    def stop_after(self, step: int) -> None:
        """Ask it to leave, as Slurm does, when this step is published; wait for its end."""
        wait_until(lambda: step in published_steps(self.run.checkpoints), self.process.poll)
        self.process.send_signal(signal.SIGTERM)
        assert self.wait() == YIELDED, self.printed

    def wait_for(self, path: Path) -> None:
        wait_until(lambda: path.exists() or self.process.poll() is not None, path)
        assert path.exists(), self.process.communicate()[0]

    @property
    def output(self) -> Path:
        return self.run.launch_output(self.epoch)

    @property
    def ended(self) -> ExitRecord:
        """What its leading agent has recorded of its end."""
        records = read_exit_records(self.run, self.epoch)
        assert len(records) == 1, self.printed
        return records[0]

    @property
    def rows(self) -> list[StepMetrics]:
        return [row for row in read_metrics(self.run) if row.epoch == self.epoch]


@dataclass(frozen=True)
class AgentRun:
    """A run directory, in which one launch follows another."""

    run: RunLayout

    @classmethod
    def made(cls, directory: Path) -> AgentRun:
        for name in ("checkpoints", "control", "epochs", "logs"):
            (directory / name).mkdir(parents=True)
        return cls(RunLayout(directory))

    @property
    def published(self) -> list[int]:
        return published_steps(self.run.checkpoints)

    def manifest(self, step: int) -> Manifest:
        found = read_manifest(self.run.checkpoints / checkpoint_name(step))
        assert found is not None
        return found

    def start(
        self,
        *words: str,
        resume: int | None = None,
        ranks: int = 1,
        environment: dict[str, str] | None = None,
        command: Sequence[str] | None = None,
        **trainer: object,
    ) -> AgentLaunch:
        """Start the next launch with these words for the tiny trainer, or with another command."""
        told = ["--resume", "{resume}"] if "--own-newest" not in words else []
        own = [sys.executable, str(TINY), "--output", "{output}", *told, *words]
        document = {**TRAINER, "command": list(command or own), **trainer}
        settings = TrainerSettings.model_validate(
            {
                "run_name": "tiny",
                "trainer": {name: value for name, value in document.items() if value is not None},
                "directory": str(self.run.directory),
                "gpus_per_node": ranks,
                "accelerator": "cpu",
                "logs": "node",
            }
        )
        self.run.train_config.write_text(settings.model_dump_json(by_alias=True))
        epoch = claim_epoch(self.run.epochs, "test")
        process = self._agent(epoch, resume, environment or {})
        return AgentLaunch(self.run, epoch, process)

    def beside(self, first: AgentLaunch, node: str = "n2") -> AgentLaunch:
        """Start the agent of another node in a launch, or of another rank of the first node."""
        more = {"RANK": "1", "WORLD_SIZE": "2", "SLURMD_NODENAME": node}
        return AgentLaunch(self.run, first.epoch, self._agent(first.epoch, None, more))

    def _agent(
        self, epoch: int, resume: int | None, environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", AGENT, str(self.run.train_config)],
            env={
                **os.environ,
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "SLURMD_NODENAME": "n1",
                "MASTER_ADDR": "127.0.0.1",
                "HPCTRAIN_EPOCH": str(epoch),
                "HPCTRAIN_RESUME": checkpoint_name(resume) if resume is not None else "",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
        )

    @property
    def seconds_since_sign(self) -> float:
        """How long ago the agent has last written its sign of life."""
        return time.time() - self.run.progress.stat().st_mtime

    def trained(self, *words: str, **more: object) -> AgentLaunch:
        """Start a launch and wait for its end."""
        launch = self.start(*words, **more)  # type: ignore[arg-type]
        launch.wait()
        return launch

    def done(self) -> dict[str, object] | None:
        path = self.run.done
        return json.loads(path.read_text()) if path.exists() else None


def children(pid: int) -> list[int]:
    """The processes that a process has started (proc(5))."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found
