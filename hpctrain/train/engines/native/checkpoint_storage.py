"""Plan and write a checkpoint and its metadata with torch.distributed.checkpoint.

The steps of `dcp.save` (state_dict_saver.py, _save_state_dict), taken apart: the ranks agree on
the plan before training continues, each writes its files beside training, and rank 0 writes the
metadata when all have finished. The plan is made once, because the structure of the state never
changes within a launch. Belongs here: these steps. Does not belong here: what is in the state.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from hpctrain.train.engine import Writing
from hpctrain.train.saving import writer as saving_writer
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.saving.shard_files import ShardFile, WriteShards, copied
from hpctrain.train.step_agreement import Control


class CheckpointStorage:
    """The plan of one launch's checkpoints. `group`: a gloo group of all ranks."""

    def __init__(self, group: Any, control: Control) -> None:
        self._group = group
        self._control = control
        self._plan: Any = None
        self._metadata: Any = None
        self.buffers = HostBuffers() if saving_writer.needs_copies() else None

    def plan(self, state: dict[str, Any], directory: Path) -> Writing:
        """Return what this rank writes; all ranks must call this together."""
        # it only plans, and writes the metadata
        writer = FileSystemWriter(directory, single_file_per_rank=True, overwrite=True)
        leads = dist.get_rank(self._group) == 0
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=leads)
        writer.set_up_storage_writer(leads)
        local = writer.prepare_local_plan(planner.create_local_plan())
        if self._plan is None:
            self._distribute_plans(planner, writer, local)
        plan = planner.finish_plan(self._plan)

        def finish(results: Any) -> None:
            own = list(itertools.chain.from_iterable((results or {}).values()))
            all_results = [None] * dist.get_world_size(self._group) if leads else None
            dist.gather_object(own, all_results, dst=0, group=self._group)
            if leads:
                writer.finish(copy.deepcopy(self._metadata), all_results)

        if not plan.items:
            return Writing(None, finish)
        # filesystem.py, write_data: one file, named after the rank
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        items = tuple((item, planner.resolve_data(item)) for item in plan.items)
        files = (ShardFile(directory / name, name, items),)
        return Writing(WriteShards(copied(files, self.buffers)), finish)

    def _distribute_plans(self, planner: Any, writer: Any, local: Any) -> None:
        """Let rank 0 assign what several ranks have to one of them, and send each its plan."""
        leads, size = dist.get_rank(self._group) == 0, dist.get_world_size(self._group)
        local_plans: list[Any] | None = [None] * size if leads else None
        dist.gather_object(local, local_plans, dst=0, group=self._group)
        plans: list[Any] | None = None
        if leads:
            plans, self._metadata = planner.create_global_plan(local_plans)
            plans = writer.prepare_global_plan(plans)
        received: list[Any] = [None]
        dist.scatter_object_list(received, plans, src=0, group=self._group)
        self._plan = dataclasses.replace(received[0])
