"""A checkpoint of FSDP or DDP: torch.distributed.checkpoint's files, for any number of ranks.

Weights and optimizer state are stored by their names in the model, so that FSDP and DDP can go on
from each other's checkpoints, with more ranks or fewer. Belongs here: what is in the state and
putting a loaded one back. Does not belong here: planning and files (see `storage`), processes and
publishing (see `hpctrain.train.saving.saver`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from hpctrain.durable import replace_text
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.train.engine import Form, Position, Writing
from hpctrain.train.engines.native.checkpoint_storage import Storage
from hpctrain.train.engines.native.engine import NativeEngine
from hpctrain.train.engines.native.mesh import seed_dropout
from hpctrain.train.saving.resume_checks import check_sample_order, damage_named
from hpctrain.train.step_agreement import Control

_ABOUT = "about.json"


class Snapshot:
    """The parts whose state makes a checkpoint."""

    form = Form(leader_files=(".metadata", _ABOUT), shards="*.distcp")

    def __init__(self, engine: NativeEngine, order: dict[str, Any], control: Control) -> None:
        self._engine = engine
        self._order = order
        self._storage = Storage(engine.mesh.control, control)

    def estimated_bytes(self, control: Control) -> int:
        """Weights as they are kept, and two moments of 4 bytes for each that is learned."""
        size_bytes = 0.0
        for parameter in self._engine.module.parameters():
            here = getattr(parameter, "_local_tensor", parameter).numel()
            size_bytes += here * (parameter.element_size() + 8 * parameter.requires_grad)
        copies = self._engine.mesh.size / self._engine.config.shard_size
        return int(control.total(size_bytes) / copies)

    def plan(self, position: Position, directory: Path) -> Writing:
        self._settle_buffers()
        if self._engine.mesh.rank == 0:
            about = dict(
                step=position.step,
                consumed_samples=position.consumed_samples,
                sample_order=self._order,
                world_size=self._engine.mesh.size,
            )
            replace_text(directory / _ABOUT, json.dumps(about, indent=1))
        return self._storage.plan(self._state(), directory)

    def restore(self, directory: Path) -> tuple[Position, str | None]:
        """Load everything from `directory`; a remark if the random state could not be kept.

        Raises InvalidInputError when the checkpoint belongs to another order of samples,
        LoadFailedError when its files are damaged.
        """
        with damage_named(directory):
            about = json.loads((directory / _ABOUT).read_text())
        check_sample_order(self._order, about["sample_order"], directory)
        same_ranks = about["world_size"] == self._engine.mesh.size
        state = self._state(random=same_ranks)
        with damage_named(directory):
            _check_names(state, directory)
            dcp.load(
                state,
                storage_reader=dcp.FileSystemReader(directory),
                process_group=self._engine.mesh.control,
            )
        self._put_back(state)
        position = Position(about["step"], about["consumed_samples"])
        self._engine.finished_steps = position.step
        return position, self._set_random(state, about["world_size"], position)

    def _state(self, *, random: bool = True) -> dict[str, Any]:
        """What is stored, with tensors of the right shapes to load into."""
        engine = self._engine
        weights, optimizer = get_state_dict(engine.module, engine.optimizer, options=self._options)
        state: dict[str, Any] = {"model": weights, "optimizer": optimizer}
        if random:
            state[self._random_key] = _random_state()
        return state

    @property
    def _options(self) -> StateDictOptions:
        """With LoRA only what is learned: the rest is read from where it came from."""
        return StateDictOptions(ignore_frozen_params=self._engine.config.lora is not None)

    def _put_back(self, state: dict[str, Any]) -> None:
        engine = self._engine
        frozen = engine.config.lora is not None
        set_state_dict(
            engine.module,
            engine.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=frozen, strict=not frozen),
        )

    @property
    def _random_key(self) -> str:
        """Ranks read different samples, so each has a state of its own."""
        return f"random.{self._engine.mesh.rank}"

    def _set_random(self, state: dict[str, Any], saved_ranks: int, at: Position) -> str | None:
        mesh, config = self._engine.mesh, self._engine.config
        if saved_ranks == mesh.size:
            kept = state[self._random_key]
            torch.set_rng_state(kept["cpu"])
            if mesh.device.type == "cuda" and "cuda" in kept:
                torch.cuda.set_rng_state(kept["cuda"])
            return None
        seed_dropout(config.seed + at.step, mesh.rank)
        return f"random state re-seeded: saved with {saved_ranks} ranks, now {mesh.size}"

    def _settle_buffers(self) -> None:
        """DDP takes rank 0's buffers at the next forward pass (running statistics of batch norms);
        the checkpoint must hold the same."""
        if self._engine.config.engine == "ddp":
            for buffer in self._engine.module.buffers():
                dist.broadcast(buffer, src=0)


def _random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _check_names(state: dict[str, Any], directory: Path) -> None:
    """Raise InvalidInputError where the checkpoint is of another model."""
    known = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    wanted = {f"model.{name}" for name in state["model"]}
    missing = sorted(wanted - known.keys())
    if missing:
        few = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        message = f"the checkpoint has no {few}: it is of another model"
        raise InvalidInputError([Problem(message, str(directory), hint="submit a new run")])
