"""Plan and write a checkpoint and its metadata with torch.distributed.checkpoint.

The steps of `dcp.save` (state_dict_saver.py, _save_state_dict), taken apart: the ranks agree on
the plan before training continues, each writes its files in a forked process, and rank 0 writes the
metadata when all have finished. The plan is made once, because the structure of the state never
changes within a launch. Belongs here: these steps. Does not belong here: what is in the state.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from hpctrain.train.engine import Writing
from hpctrain.train.step_agreement import Control


class CheckpointStorage:
    """The plan of one launch's checkpoints. `group`: a gloo group of all ranks."""

    def __init__(self, group: Any, control: Control) -> None:
        self._group = group
        self._control = control
        self._plan: Any = None
        self._metadata: Any = None
        self._host_copy: Any = None

    def plan(self, state: dict[str, Any], directory: Path) -> Writing:
        """Return what this rank writes; all ranks must call this together."""
        writer = FileSystemWriter(
            # one thread, nothing of CUDA: it runs in a forked process
            directory,
            single_file_per_rank=True,
            sync_files=True,
            thread_count=1,
            per_thread_copy_ahead=0,
            overwrite=True,
        )
        leads = dist.get_rank(self._group) == 0
        if torch.cuda.is_available():
            # copies of tensors on a GPU; those on the CPU the fork keeps as they are
            if self._host_copy is None:
                self._host_copy = _create_cpu_state_dict(state, pin_memory=True)
            _copy_state_dict(state, self._host_copy)
            torch.cuda.synchronize()
            state = self._host_copy
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=leads)
        writer.set_up_storage_writer(leads)
        local = writer.prepare_local_plan(planner.create_local_plan())
        if self._plan is None:
            self._distribute_plans(planner, writer, local)
        plan = planner.finish_plan(self._plan)

        def write() -> tuple[list[str], Any]:
            results = writer.write_data(plan, planner).value()
            return sorted({result.storage_data.relative_path for result in results}), results

        def finish(results: Any) -> None:
            all_results = [None] * dist.get_world_size(self._group) if leads else None
            dist.gather_object(results or [], all_results, dst=0, group=self._group)
            if leads:
                writer.finish(copy.deepcopy(self._metadata), all_results)

        return Writing(write if plan.items else None, finish)

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
