"""Save and restore DeepSpeed's own checkpoint files, written by the run's writers.

`mp_rank_00_model_states.pt`, `zero_pp_rank_R_mp_rank_00_optim_states.pt` and so on are in the
checkpoint's directory as DeepSpeed would write them, so that its own tools read them
(`zero_to_fp32`, `ds_to_universal`). Beside them are each rank's random state and, for people,
`about.json`. No file `latest` is written or read. Belongs here: what is in a checkpoint and
restoring it. Does not belong here: another layout (see `universal_checkpoint`), processes and
publishing (see `hpctrain.train.saving.saver`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from hpctrain.base.durable import replace_text
from hpctrain.train.engine import Form, Position, Writing
from hpctrain.train.engines.deepspeed.engine import ZeroEngine
from hpctrain.train.engines.deepspeed.library import silence
from hpctrain.train.engines.deepspeed.mesh import seed_dropout
from hpctrain.train.engines.deepspeed.optimizer import reset_settings
from hpctrain.train.engines.deepspeed.pipeline import PipelineEngine
from hpctrain.train.engines.deepspeed.universal_checkpoint import (
    convert,
    layout_summary,
    names_as_saved,
    refuse_unreadable_layout,
    stages_layout,
)
from hpctrain.train.engines.models.random_state import random_state, set_random_state
from hpctrain.train.saving import writer
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.saving.resume_checks import check_sample_order, damage_named
from hpctrain.train.step_agreement import Control

AnyEngine = ZeroEngine | PipelineEngine
_ABOUT = "about.json"
_SWAPPED = "offloaded_tensors"


class _StateCollector(TorchCheckpointEngine):
    """Replaces DeepSpeed's writer: collects what it would write, for the run's own writer."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, Any] = {}

    def create(self, info: Any) -> None:
        """Do nothing: the saver has made the directory."""

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path).name] = state_dict


class DeepSpeedSnapshot:
    """The parts whose state makes a checkpoint; implements `hpctrain.train.engine.Snapshot`."""

    form = Form(leader_files=(_ABOUT,), shards="*.pt")

    def __init__(self, engine: AnyEngine, order: dict[str, Any], control: Control) -> None:
        self._engine = engine
        self._order = order
        self._control = control
        self._decays = [g["weight_decay"] for g in engine.inner.optimizer.param_groups]
        self.buffers = HostBuffers() if writer.needs_copies() else None
        self._collector = _StateCollector()
        engine.inner.checkpoint_engine = self._collector
        # a script for people, which DeepSpeed would write beside all checkpoints
        engine.inner._copy_recovery_script = lambda path: None

    def estimated_bytes(self, control: Control) -> int:
        """Estimate the size on disk: weights as trained, fp32 copies, two moments of 4 bytes."""
        config, weights = self._engine.config, self._engine.inner.module.parameters()
        each = 2 if config.precision == "bf16" else 4
        here = sum(
            getattr(weight, "ds_numel", weight.numel()) * (each + 12 * weight.requires_grad)
            for weight in weights
        )
        return int(control.total(here) / config.data_parallel_size)

    def plan(self, position: Position, directory: Path) -> Writing:
        config, rank = self._engine.config, self._engine.mesh.rank
        if rank == 0:
            about = dict(
                step=position.step,
                consumed_samples=position.consumed_samples,
                sample_order=self._order,
                **self._layout(),
                zero_stage=config.zero_stage,
                precision=config.precision,
                on_nvme="nvme" in (config.offload_optimizer, config.offload_parameters),
            )
            replace_text(directory / _ABOUT, json.dumps(about, indent=1))
        self._collector.files = {}
        self._engine.inner.save_checkpoint(
            str(directory.parent),
            tag=directory.name,
            save_latest=False,
            exclude_frozen_parameters=config.lora is not None,
        )
        files = {**self._collector.files, _random_name(rank): random_state()}
        self._collector.files = {}

        if self.buffers is not None:
            files = _copied(files, self.buffers)
        return Writing(_WriteFiles(directory, rank, files), lambda result: None)

    def restore(self, directory: Path) -> tuple[Position, str | None]:
        """Load everything from `directory`; returns a remark if the random state was re-seeded.

        Raises InvalidInputError if the checkpoint belongs to another order of samples or cannot
        be resumed by these ranks, LoadFailedError if its files are damaged.
        """
        engine, config, mesh = self._engine, self._engine.config, self._engine.mesh
        with damage_named(directory):
            about = json.loads((directory / _ABOUT).read_text())
        check_sample_order(self._order, about["sample_order"], directory)
        saved, now = layout_summary(about), layout_summary(self._layout())
        source = self._load_source(about, directory, same_layout=saved == now)
        names = names_as_saved(config, engine.inner.optimizer, about["stages_layout"])
        with names, damage_named(directory), silence():
            engine.inner.load_checkpoint(
                str(source.parent),
                tag=source.name,
                load_module_strict=config.lora is None,
            )
        reset_settings(config, engine.inner, self._decays)
        position = Position(about["step"], about["consumed_samples"])
        engine.finished_steps = position.step
        if saved != now:
            seed_dropout(config, config.seed + position.step, mesh.rank)
            return position, f"random state re-seeded: saved with {saved}, now {now}"
        with damage_named(directory):
            state = torch.load(directory / _random_name(mesh.rank), weights_only=True)
        set_random_state(state, mesh.device)
        return position, None

    def _load_source(self, about: dict[str, Any], directory: Path, *, same_layout: bool) -> Path:
        """Return the checkpoint itself, or its conversion for another layout."""
        config, mesh = self._engine.config, self._engine.mesh
        refuse_unreadable_layout(config, mesh.size, about, directory)
        same = about["zero_stage"] == config.zero_stage and same_layout
        converts = config.zero_stage > 0 and not same
        # read only when a checkpoint is loaded (runtime/engine.py, load_universal_checkpoint)
        self._engine.inner._config.load_universal_checkpoint = converts
        if not converts:
            return directory
        return convert(directory, self._control, mesh.rank, mesh.size)

    def _layout(self) -> dict[str, Any]:
        config = self._engine.config
        return dict(
            world_size=self._engine.mesh.size,
            tensor_parallel=config.tensor_parallel,
            stages_layout=stages_layout(config),
        )


def _random_name(rank: int) -> str:
    return f"random_rank_{rank:06d}.pt"


@dataclass(frozen=True)
class _WriteFiles:
    """Writes the files of one rank; can be sent to another process."""

    directory: Path
    rank: int
    files: dict[str, Any]

    def __call__(self) -> tuple[list[str], Any]:
        for name, state in self.files.items():
            with (self.directory / name).open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
        # what DeepSpeed has copied from this rank's NVMe (runtime/engine.py, save_checkpoint)
        root = self.directory / _SWAPPED / f"rank{self.rank:0>2d}"
        copied = [str(p.relative_to(self.directory)) for p in root.rglob("*") if p.is_file()]
        return sorted([*self.files, *copied]), None


def _copied(files: dict[str, Any], buffers: HostBuffers) -> dict[str, Any]:
    """Copy all tensors into `buffers`: those of GPUs, and those that the optimizer changes on the
    host, which DeepSpeed pins (stage_1_and_2.py): the driver maps pinned memory shared."""
    tensors: dict[int, torch.Tensor] = {}

    def collect(value: Any) -> Any:
        tensors.setdefault(id(value), value)
        return value

    _each_tensor(files, collect)
    copies = dict(zip(tensors, buffers.copy(tensors.values()), strict=True))
    return _each_tensor(files, lambda value: copies[id(value)])


def _each_tensor(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Rebuild nested containers with `change` applied to each tensor."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, dict):
        return type(state)((key, _each_tensor(value, change)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(_each_tensor(value, change) for value in state)
    return state
