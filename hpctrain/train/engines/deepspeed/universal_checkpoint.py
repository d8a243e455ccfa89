"""Resume with other ranks or other stages, by DeepSpeed's universal checkpoints.

DeepSpeed's files hold what each rank had; another layout cannot read them. Its converter makes one
file per weight of them, once: the result stays in the checkpoint's directory, below `universal/`,
until the checkpoint is retired. Belongs here: converting, what cannot be converted, and weights'
names there. Does not belong here: loading (see `snapshot`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.errors import CheckpointError, InvalidInputError, Problem
from hpctrain.checkpoints.resume_shares import even_share
from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.records.manifest import file_problem, read_rank_digests, write_rank_digests
from hpctrain.train.engines.deepspeed.pipeline_stages import names_in_stages
from hpctrain.train.engines.models.build import build_module
from hpctrain.train.faults import BadCheckpointError, LoadFailedError, is_full
from hpctrain.train.free_space import NoSpaceError
from hpctrain.train.saving.digest_check import DigestCheck
from hpctrain.train.step_agreement import Control

_NO_PIPELINE = "no pipeline"
_NAME = "universal"
_PARTIAL = "universal.partial"
_POLL_SECONDS = 0.2
# Processes that read files of many gigabytes in parallel.
_WORKERS = 4
_TAIL_CHARACTERS = 400
# Errors of torch.load for a damaged file; see `hpctrain.train.faults.is_damage`.
_DAMAGE = re.compile(r"PytorchStreamReader|EOFError|UnpicklingError|KeyError")


def refuse_unreadable_layout(
    config: DeepSpeedConfig, ranks: int, about: dict[str, Any], directory: Path
) -> None:
    """Raise InvalidInputError if a checkpoint can be resumed only as it was saved."""
    saved, now = about["zero_stage"], config.zero_stage
    if saved != now and (saved in (0, 3) or now in (0, 3)):
        # checkpoint/ds_to_universal.py writes another layout for stage 3; stage 0 has no shards
        message = f"was saved at ZeRO stage {saved}, and stage {now} cannot read it"
        hint = f"set `optimizer.zero: {saved}`; only stages 1 and 2 read each other's checkpoints"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])
    tensors = about.get("tensor_parallel", 1)
    if saved == 0 and tensors != config.tensor_parallel:
        message = f"was saved at ZeRO stage 0 with tp {tensors}, not {config.tensor_parallel}"
        hint = f"resume with tp {tensors}; at stages 1 and 2 another tp can resume"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])
    if about["precision"] != config.precision:
        message = f"was saved in {about['precision']}, and the run is in {config.precision} now"
        raise InvalidInputError([Problem(message, str(directory), hint="submit a new run")])
    if about["on_nvme"] and about["world_size"] != ranks:
        message = f"its state on NVMe belongs to {about['world_size']} ranks, and there are {ranks}"
        hint = "resume with as many ranks, or train with `offload: cpu` to be able to change them"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])


def stages_layout(config: DeepSpeedConfig) -> str:
    """Describe which stage has which layers; stored in checkpoints."""
    if not config.pipeline_stages:
        return _NO_PIPELINE
    near = "pipelines" if config.pipelines_near else "stages"
    layers = "+".join(map(str, config.pipeline_stages))
    return f"stages of {layers} layers, {near} on neighbours"


def layout_summary(layout: dict[str, Any]) -> str:
    """Describe the ranks and what each has, from fields of a checkpoint's `about.json`."""
    tensors = layout.get("tensor_parallel", 1)
    axes = [f"tp {tensors}"] * (tensors > 1) + [layout["stages_layout"]]
    return f"{layout['world_size']} ranks ({', '.join(axes)})"


@contextlib.contextmanager
def names_as_saved(config: DeepSpeedConfig, optimizer: Any, saved_layout: str) -> Iterator[None]:
    """Rename the optimizer's weights to the names of `saved_layout` inside the block.

    runtime/base_optimizer.py finds their files by these names. They are the model's names, or in a
    pipeline those of its layers.
    """
    in_stages = saved_layout != _NO_PIPELINE
    if in_stages == bool(config.pipeline_stages):
        yield
        return
    module = build_module(config, device=torch.device("meta"), initialize=False)
    saved = names_in_stages(config, module)
    if not in_stages:
        saved = {here: there for there, here in saved.items()}
    own = optimizer.param_names
    optimizer.param_names = {weight: saved[name] for weight, name in own.items()}
    try:
        yield
    finally:
        optimizer.param_names = own


def convert(directory: Path, control: Control, rank: int, ranks: int) -> Path:
    """Return the universal checkpoint of `directory`, which rank 0 makes if necessary.

    That is if it is missing or if its content has changed since. All ranks compare the content,
    each a share.

    All ranks must call this. They poll rank 0 instead of waiting in one collective operation,
    whose time limit a large checkpoint would exceed. Raises LoadFailedError if the files are
    damaged, NoSpaceError if the disk is full, CheckpointError for other errors.
    """
    target = directory / _NAME
    complete = "complete" if rank == 0 and _is_complete(target) else None
    if control.from_leader(complete) is not None:
        share = even_share(read_rank_digests(target), rank, ranks)
        with contextlib.suppress(BadCheckpointError):
            DigestCheck(target, share, f"rank {rank}").agree(control)
            return target
    converter = _Converter(directory) if rank == 0 else None
    while True:
        state = control.from_leader(converter.state() if converter is not None else "done")
        assert state is not None, "rank 0 always sends a state"
        if state == "done":
            return target
        if state != "running":
            message = f"cannot convert {directory.name} for other ranks: {state}"
            if is_full(RuntimeError(state)):
                raise NoSpaceError(message)
            raise (LoadFailedError if _DAMAGE.search(state) else CheckpointError)(message)
        time.sleep(_POLL_SECONDS)


def _is_complete(target: Path) -> bool:
    """Return whether an earlier launch has made it, and no file has been truncated since."""
    try:
        files = read_rank_digests(target)
    except (OSError, ValueError):
        return False
    return bool(files) and not any(file_problem(target, file, deep=False) for file in files)


class _Converter:
    """DeepSpeed's converter in a separate process, which needs neither ranks nor GPUs."""

    def __init__(self, directory: Path) -> None:
        self._partial, self._target = directory / _PARTIAL, directory / _NAME
        shutil.rmtree(self._partial, ignore_errors=True)
        shutil.rmtree(self._target, ignore_errors=True)
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        # --inject_missing_state: it needs a version that only Megatron-DeepSpeed writes
        command += ["--input_folder", str(directory), "--output_folder", str(self._partial)]
        command += ["--inject_missing_state", "--num_extract_workers", str(_WORKERS)]
        self._log = (directory / f"{_NAME}.log").open("w+b")
        # without a launcher's variables; on the CPU, because it only rearranges files
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        environment = {k: v for k, v in os.environ.items() if k not in launcher}
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment
        )

    def state(self) -> str:
        """Return `running`, `done` (after publishing the result), or an error message."""
        code = self._process.poll()
        if code is None:
            return "running"
        if code != 0:
            self._log.seek(0)
            text = self._log.read().decode(errors="replace").strip()
            return text[-_TAIL_CHARACTERS:] or "the converter printed nothing"
        try:
            (self._partial.parent / "latest_universal").unlink(missing_ok=True)
            names = [str(p.relative_to(self._partial)) for p in self._partial.rglob("*.pt")]
            write_rank_digests(self._partial, 0, names)
            os.replace(self._partial, self._target)
        except OSError as error:
            return str(error)
        return "done"
