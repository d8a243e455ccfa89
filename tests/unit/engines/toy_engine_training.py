"""The toy engine in the process of a rank: `join`, `build`, and what they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from toy_engine_document import ToyConfig

from hpctrain.base.durable import replace_text
from hpctrain.train.engine import Evaluation, Form, Parts, Position, Update, Writing
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.schedule import learning_rate
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import StepClock


@dataclass(frozen=True)
class Mesh:
    """One rank on its own."""

    control: Any
    reads: bool = True


def join(config: ToyConfig, launch: Launch) -> Mesh:
    assert launch.world_size == 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Mesh(dist.group.WORLD)


def build(job: Job, mesh: Mesh, control: Control) -> Parts:
    config = job.config
    assert isinstance(config, ToyConfig)
    torch.manual_seed(config.seed)
    engine = ToyEngine(config, torch.nn.Linear(config.inputs, 1), StepClock())
    return Parts(engine, ToySnapshot(engine))


@dataclass
class ToyEngine:
    """Learns to add up its inputs."""

    config: ToyConfig
    line: torch.nn.Linear
    clock: StepClock
    finished_steps: int = 0
    rejection: str | None = None

    def update(self, samples: range, before_step: Callable[[], None]) -> Update:
        rate, size = learning_rate(self.config, self.finished_steps), len(samples)
        generator = torch.Generator().manual_seed(samples.start)
        drawn = torch.rand(size, self.config.inputs, generator=generator)
        with self.clock.computing():
            losses = (self.line(drawn)[:, 0] - drawn.sum(1)) ** 2
        with self.clock.timing("backward"):
            self.line.zero_grad()
            losses.mean().backward()
        before_step()
        gradients = [p.grad for p in self.line.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        with torch.no_grad():
            for parameter in self.line.parameters():
                parameter -= rate * parameter.grad
        self.finished_steps += 1
        totals = torch.stack([losses.detach().sum(), torch.tensor(float(size))])
        return Update(totals, norm, rate)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        return None

    def weights_are_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.line.parameters())


class ToySnapshot:
    """Weights in one file, the position in another."""

    form = Form(leader_files=("about.json",), shards="*.pt")
    buffers = None

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine

    def estimated_bytes(self, control: Control) -> int:
        return 4 * (self._engine.config.inputs + 1)

    def plan(self, position: Position, directory: Path) -> Writing:
        about = dict(step=position.step, consumed_samples=position.consumed_samples)
        replace_text(directory / "about.json", json.dumps(about))
        state = {name: one.clone() for name, one in self._engine.line.state_dict().items()}

        def write() -> tuple[list[str], Any]:
            torch.save(state, directory / "line.pt")
            return ["line.pt"], None

        return Writing(write, lambda results: None)

    def restore(self, directory: Path) -> tuple[Position, str | None]:
        self._engine.line.load_state_dict(torch.load(directory / "line.pt"))
        position = Position(**self._about(directory))
        self._engine.finished_steps = position.step
        return position, None

    def _about(self, directory: Path) -> dict[str, int]:
        about = json.loads((directory / "about.json").read_text())
        return {"step": about["step"], "consumed_samples": about["consumed_samples"]}
