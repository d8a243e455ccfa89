"""Save and restore FSDP and DDP as torch.distributed.checkpoint's files, for any number of ranks.

Weights and optimizer state are stored by their names in the model, so that FSDP and DDP can resume
each other's checkpoints, with more ranks or fewer. Belongs here: what is in the state, planning who
writes it, and restoring it. Does not belong here: files (see `hpctrain.train.saving.shard_files`),
processes and publishing (see `hpctrain.train.saving.saver`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.train.device import random_state, set_random_state
from hpctrain.train.engine import Form, Position, Writing
from hpctrain.train.engines.native.engine import NativeEngine, seed_dropout
from hpctrain.train.saving import writer as saving_writer
from hpctrain.train.saving.digest_check import check_sample_order, damage_named
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.saving.shard_files import ShardFile, WriteShards, copied
from hpctrain.train.step_agreement import Control

_ABOUT = "about.json"


class NativeSnapshot:
    """The parts whose state makes a checkpoint; implements `hpctrain.train.engine.Snapshot`."""

    form = Form(leader_files=(".metadata", _ABOUT), shards="*.distcp")

    def __init__(self, engine: NativeEngine, order: dict[str, Any]) -> None:
        self._engine = engine
        self._order = order
        self._plan: Any = None
        self._metadata: Any = None
        self.buffers = HostBuffers() if saving_writer.needs_copies() else None

    def estimated_bytes(self, control: Control) -> int:
        """Estimate the size on disk: weights, and two moments of 4 bytes per trainable one."""
        size_bytes = 0.0
        for parameter in self._engine.module.parameters():
            here = getattr(parameter, "_local_tensor", parameter).numel()
            size_bytes += here * (parameter.element_size() + 8 * parameter.requires_grad)
        copies = self._engine.mesh.size / self._engine.config.shard_size
        return int(control.total(size_bytes) / copies)

    def plan(self, position: Position, directory: Path) -> Writing:
        if self._engine.config.engine == "ddp":
            # DDP takes rank 0's buffers (running statistics of batch norms) at the next forward
            # pass; the checkpoint must hold the same.
            for buffer in self._engine.module.buffers():
                dist.broadcast(buffer, src=0)
        if self._engine.mesh.rank == 0:
            about = dict(
                step=position.step,
                consumed_samples=position.consumed_samples,
                sample_order=self._order,
                world_size=self._engine.mesh.size,
            )
            replace_text(directory / _ABOUT, json.dumps(about, indent=1))
        return self._writing(directory)

    def restore(self, directory: Path) -> tuple[Position, str | None]:
        """Load everything from `directory`; returns a remark if the random state was re-seeded.

        Raises InvalidInputError if the checkpoint belongs to another order of samples or another
        model, LoadFailedError if its files are damaged.
        """
        engine, mesh = self._engine, self._engine.mesh
        with damage_named(directory):
            about = json.loads((directory / _ABOUT).read_text())
        check_sample_order(self._order, about["sample_order"], directory)
        saved_ranks = about["world_size"]
        state = self._state(random=saved_ranks == mesh.size)
        with damage_named(directory):
            known = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
            missing = sorted({f"model.{name}" for name in state["model"]} - known.keys())
            if missing:
                few = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
                message = f"the checkpoint has no {few}: it is of another model"
                raise InvalidInputError([Problem(message, str(directory), hint="submit a new run")])
            dcp.load(
                state,
                storage_reader=dcp.FileSystemReader(directory),
                process_group=mesh.control,
            )
        frozen = engine.config.lora is not None
        set_state_dict(
            engine.module,
            engine.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=frozen, strict=not frozen),
        )
        position = Position(about["step"], about["consumed_samples"])
        engine.finished_steps = position.step
        if saved_ranks == mesh.size:
            set_random_state(state[self._random_key], mesh.device)
            return position, None
        seed_dropout(engine.config.seed + position.step, mesh.rank)
        return position, f"random state re-seeded: saved with {saved_ranks} ranks, now {mesh.size}"

    def _state(self, *, random: bool = True) -> dict[str, Any]:
        """Return what is stored, with tensors of the right shapes to load into.

        With LoRA that is trainable weights only: the others come from the pretrained model.
        """
        engine = self._engine
        options = StateDictOptions(ignore_frozen_params=engine.config.lora is not None)
        weights, optimizer = get_state_dict(engine.module, engine.optimizer, options=options)
        state: dict[str, Any] = {"model": weights, "optimizer": optimizer}
        if random:
            state[self._random_key] = random_state()
        return state

    @property
    def _random_key(self) -> str:
        """Each rank has its own state, because ranks read different samples."""
        return f"random.{self._engine.mesh.rank}"

    def _writing(self, directory: Path) -> Writing:
        """Return what this rank writes; all ranks must call this together.

        The steps of `dcp.save` (state_dict_saver.py, _save_state_dict), taken apart: the ranks
        agree on the plan before training continues, each writes its files beside training, and rank
        0 writes the metadata when all have finished. The plan is made once, because the structure
        of the state never changes within a launch.
        """
        state, group = self._state(), self._engine.mesh.control
        # it only plans, and writes the metadata
        writer = FileSystemWriter(directory, single_file_per_rank=True, overwrite=True)
        leads = dist.get_rank(group) == 0
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=leads)
        writer.set_up_storage_writer(leads)
        local = writer.prepare_local_plan(planner.create_local_plan())
        if self._plan is None:
            # rank 0 assigns what several ranks have to one of them, and sends each its plan
            plans: list[Any] | None = [None] * dist.get_world_size(group) if leads else None
            dist.gather_object(local, plans, dst=0, group=group)
            if leads:
                plans, self._metadata = planner.create_global_plan(plans)
                plans = writer.prepare_global_plan(plans)
            received: list[Any] = [None]
            dist.scatter_object_list(received, plans, src=0, group=group)
            self._plan = dataclasses.replace(received[0])
        plan = planner.finish_plan(self._plan)

        def finish(results: Any) -> None:
            own = list(itertools.chain.from_iterable((results or {}).values()))
            all_results = [None] * dist.get_world_size(group) if leads else None
            dist.gather_object(own, all_results, dst=0, group=group)
            if leads:
                writer.finish(copy.deepcopy(self._metadata), all_results)

        if not plan.items:
            return Writing(None, finish)
        # filesystem.py, write_data: one file, named after the rank
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        items = tuple((item, planner.resolve_data(item)) for item in plan.items)
        files = (ShardFile(directory / name, name, items),)
        return Writing(WriteShards(copied(files, self.buffers)), finish)
