"""Who writes which tensor of a checkpoint, by torch.distributed.checkpoint, and its metadata.

The steps of `dcp.save` (state_dict_saver.py, _save_state_dict), taken apart: the ranks agree on
the plan before training goes on, each writes its files in a forked process, and rank 0 writes the
metadata when all are through. The plan is made once, for the structure of the state never changes
within a launch. Belongs here: these steps. Does not belong here: what is in the state.
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


class Storage:
    """The plan of one launch's checkpoints. `group`: a gloo group of all ranks."""

    def __init__(self, group: Any, control: Control) -> None:
        self._group = group
        self._control = control
        self._mine: Any = None
        self._metadata: Any = None
        self._host: Any = None

    def plan(self, state: dict[str, Any], directory: Path) -> Writing:
        """What this rank writes; all ranks must call this together."""
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
        planner = DefaultSavePlanner()
        planner.set_up_planner(self._on_host(state), is_coordinator=leads)
        writer.set_up_storage_writer(leads)
        local = writer.prepare_local_plan(planner.create_local_plan())
        if self._mine is None:
            self._agree(planner, writer, local)
        mine = planner.finish_plan(self._mine)

        def write() -> tuple[list[str], Any]:
            results = writer.write_data(mine, planner).value()
            return sorted({one.storage_data.relative_path for one in results}), results

        def finish(results: Any) -> None:
            everything = [None] * dist.get_world_size(self._group) if leads else None
            dist.gather_object(results or [], everything, dst=0, group=self._group)
            if leads:
                writer.finish(copy.deepcopy(self._metadata), everything)

        return Writing(write if mine.items else None, finish)

    def _agree(self, planner: Any, writer: Any, local: Any) -> None:
        """Rank 0 deals out what several ranks have, and tells each its part."""
        leads, size = dist.get_rank(self._group) == 0, dist.get_world_size(self._group)
        plans: list[Any] | None = [None] * size if leads else None
        dist.gather_object(local, plans, dst=0, group=self._group)
        dealt: list[Any] | None = None
        if leads:
            dealt, self._metadata = planner.create_global_plan(plans)
            dealt = writer.prepare_global_plan(dealt)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, dealt, src=0, group=self._group)
        self._mine = dataclasses.replace(mine[0])

    def _on_host(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copies on the CPU of what is on a GPU; what is there already, the fork keeps as it is."""
        if not torch.cuda.is_available():
            return state
        if self._host is None:
            self._host = _create_cpu_state_dict(state, pin_memory=True)
        _copy_state_dict(state, self._host)
        torch.cuda.synchronize()
        return self._host
