"""A checkpoint of DeepSpeed: its own files, written by the run's writers.

`mp_rank_00_model_states.pt`, `zero_pp_rank_R_mp_rank_00_optim_states.pt` and so on lie in the
checkpoint's directory as DeepSpeed would put them there, so that its own tools read them
(`zero_to_fp32`, `ds_to_universal`); beside them each rank's random state and, for people,
`about.json`. No file `latest` is written or believed. Belongs here: what is in a checkpoint and
putting a loaded one back. Does not belong here: another layout (see `universal`), processes and
publishing (see `hpctrain.train.saving.saver`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from hpctrain.durable import replace_text
from hpctrain.train.engine import Form, Position, Writing
from hpctrain.train.engines.deepspeed.engine import ZeroEngine
from hpctrain.train.engines.deepspeed.library import silence
from hpctrain.train.engines.deepspeed.mesh import seed_dropout
from hpctrain.train.engines.deepspeed.optimizer import settle
from hpctrain.train.engines.deepspeed.pipeline import PipelineEngine
from hpctrain.train.engines.deepspeed.universal_checkpoint import (
    converted,
    names_as_saved,
    placing,
    refuse_what_cannot_move,
    stages_layout,
)
from hpctrain.train.saving.resume_checks import check_sample_order, damage_named
from hpctrain.train.step_agreement import Control

AnyEngine = ZeroEngine | PipelineEngine
_ABOUT = "about.json"
_SWAPPED = "offloaded_tensors"


class _Collected(TorchCheckpointEngine):
    """In the place of DeepSpeed's writer: remembers what it would write, for a forked process."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, Any] = {}

    def create(self, info: Any) -> None:
        """Nothing to prepare: the saver has made the directory."""

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path).name] = _on_host(state_dict)


class Snapshot:
    """The parts whose state makes a checkpoint."""

    form = Form(leader_files=(_ABOUT,), shards="*.pt")

    def __init__(self, engine: AnyEngine, order: dict[str, Any], control: Control) -> None:
        self._engine = engine
        self._order = order
        self._control = control
        self._decays = [g["weight_decay"] for g in engine.inner.optimizer.param_groups]
        self._collected = _Collected()
        engine.inner.checkpoint_engine = self._collected
        # a script for people, which DeepSpeed would put beside all checkpoints
        engine.inner._copy_recovery_script = lambda path: None

    def estimated_bytes(self, control: Control) -> int:
        """Weights as they are trained, an fp32 copy of them, and two moments of 4 bytes each."""
        config, weights = self._engine.config, self._engine.inner.module.parameters()
        each = 2 if config.precision == "bf16" else 4
        here = sum(
            getattr(one, "ds_numel", one.numel()) * (each + 12 * one.requires_grad)
            for one in weights
        )
        return int(control.total(here) / config.data_parallel_size)

    def plan(self, position: Position, directory: Path) -> Writing:
        rank = self._engine.mesh.rank
        if rank == 0:
            replace_text(directory / _ABOUT, json.dumps(self._about(position), indent=1))
        self._collected.files = {}
        self._engine.inner.save_checkpoint(
            str(directory.parent),
            tag=directory.name,
            save_latest=False,
            exclude_frozen_parameters=self._engine.config.lora is not None,
        )
        files = {**self._collected.files, _random_name(rank): _random_state()}
        self._collected.files = {}

        def write() -> tuple[list[str], Any]:
            for name, state in files.items():
                _write(state, directory / name)
            return sorted([*files, *_swapped(directory, rank)]), None

        return Writing(write, lambda told: None)

    def restore(self, directory: Path) -> tuple[Position, str | None]:
        """Load everything from `directory`; a remark if the random state could not be kept.

        Raises InvalidInputError when the checkpoint belongs to another order of samples or cannot
        go on with these ranks, LoadFailedError when its files are damaged.
        """
        engine = self._engine
        with damage_named(directory):
            about = json.loads((directory / _ABOUT).read_text())
        check_sample_order(self._order, about["sample_order"], directory)
        source = self._source(about, directory)
        names = names_as_saved(engine.config, engine.inner.optimizer, about["stages_layout"])
        with names, damage_named(directory), silence():
            engine.inner.load_checkpoint(
                str(source.parent),
                tag=source.name,
                load_module_strict=engine.config.lora is None,
            )
        settle(engine.config, engine.inner, self._decays)
        position = Position(about["step"], about["consumed_samples"])
        engine.finished_steps = position.step
        return position, self._set_random(directory, about, position)

    def _about(self, position: Position) -> dict[str, Any]:
        config = self._engine.config
        return dict(
            step=position.step,
            consumed_samples=position.consumed_samples,
            sample_order=self._order,
            **self._layout(),
            zero_stage=config.zero_stage,
            precision=config.precision,
            on_nvme="nvme" in (config.offload_optimizer, config.offload_parameters),
        )

    def _source(self, about: dict[str, Any], directory: Path) -> Path:
        """The checkpoint itself, or what it was converted to for another layout."""
        config, size = self._engine.config, self._engine.mesh.size
        refuse_what_cannot_move(config, size, about, directory)
        same = about["zero_stage"] == config.zero_stage and self._is_at_home(about)
        moves = config.zero_stage > 0 and not same
        # read at loading only (runtime/engine.py, load_universal_checkpoint)
        self._engine.inner._config.load_universal_checkpoint = moves
        if not moves:
            return directory
        return converted(directory, self._control, self._engine.mesh.rank, size)

    def _is_at_home(self, about: dict[str, Any]) -> bool:
        """True if each rank does what it did."""
        return placing(about) == placing(self._layout())

    def _layout(self) -> dict[str, Any]:
        config = self._engine.config
        return dict(
            world_size=self._engine.mesh.size,
            tensor_parallel=config.tensor_parallel,
            stages_layout=stages_layout(config),
        )

    def _set_random(self, directory: Path, about: dict[str, Any], at: Position) -> str | None:
        mesh, config = self._engine.mesh, self._engine.config
        if not self._is_at_home(about):
            seed_dropout(config, config.seed + at.step, mesh.rank)
            words = f"saved with {placing(about)}, now {placing(self._layout())}"
            return f"random state re-seeded: {words}"
        with damage_named(directory):
            kept = torch.load(directory / _random_name(mesh.rank), weights_only=True)
        torch.set_rng_state(kept["cpu"])
        if mesh.device.type == "cuda" and "cuda" in kept:
            torch.cuda.set_rng_state(kept["cuda"])
        return None


def _random_name(rank: int) -> str:
    return f"random_rank_{rank:06d}.pt"


def _random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _swapped(directory: Path, rank: int) -> list[str]:
    """What DeepSpeed has copied from this rank's NVMe (runtime/engine.py, save_checkpoint)."""
    root = directory / _SWAPPED / f"rank{rank:0>2d}"
    return [str(one.relative_to(directory)) for one in root.rglob("*") if one.is_file()]


def _on_host(state: Any) -> Any:
    """A copy with tensors of GPUs on the CPU; those on the CPU the fork keeps as they are."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu() if state.device.type == "cuda" else state
    if isinstance(state, dict):
        return type(state)((key, _on_host(value)) for key, value in state.items())
    if isinstance(state, list | tuple) and type(state) in (list, tuple):
        return type(state)(_on_host(value) for value in state)
    return state


def _write(state: Any, path: Path) -> None:
    with path.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
