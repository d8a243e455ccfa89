"""Going on with other ranks or other stages, by DeepSpeed's universal checkpoints.

DeepSpeed's files hold what each rank had; another layout cannot read them. Its converter makes one
file per weight of them, once: what it has made stays in the checkpoint's directory, below
`universal/`, until the checkpoint is retired. Belongs here: converting, what cannot be converted,
and what weights are called there. Does not belong here: loading (see `snapshot`).
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

from hpctrain.checkpoints.digest_shares import even_share
from hpctrain.checkpoints.manifest import file_problem, read_rank_digests, write_rank_digests
from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.errors import CheckpointError, InvalidInputError, Problem
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
# Files of many gigabytes are read: some side by side.
_WORKERS = 4
_TAIL_CHARACTERS = 400
# How torch.load words what a damaged file holds; see `hpctrain.train.faults.is_damage`.
_DAMAGE_WORDS = re.compile(r"PytorchStreamReader|EOFError|UnpicklingError|KeyError")


def refuse_what_cannot_move(
    config: DeepSpeedConfig, ranks: int, about: dict[str, Any], directory: Path
) -> None:
    """Raise InvalidInputError where a checkpoint can only go on as it was saved."""
    saved, now = about["zero_stage"], config.zero_stage
    apart = saved != now and (saved in (0, 3) or now in (0, 3))
    if apart:
        # checkpoint/ds_to_universal.py writes another layout for stage 3; stage 0 has no shards
        message = f"was saved at ZeRO stage {saved}, and stage {now} cannot read it"
        hint = f"set `optimizer.zero: {saved}`; only stages 1 and 2 read each other's checkpoints"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])
    tensors = about.get("tensor_parallel", 1)
    if saved == 0 and tensors != config.tensor_parallel:
        message = f"was saved at ZeRO stage 0 with tp {tensors}, not {config.tensor_parallel}"
        hint = "go on with as many; at stages 1 and 2 another tp can go on"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])
    if about["precision"] != config.precision:
        message = f"was saved in {about['precision']}, and the run is in {config.precision} now"
        raise InvalidInputError([Problem(message, str(directory), hint="submit a new run")])
    if about["on_nvme"] and about["world_size"] != ranks:
        message = f"its state on NVMe belongs to {about['world_size']} ranks, and there are {ranks}"
        hint = "go on with as many ranks, or train with `offload: cpu` to be able to change them"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])


def stages_layout(config: DeepSpeedConfig) -> str:
    """Where the layers are, in words."""
    if not config.pipeline_stages:
        return _NO_PIPELINE
    near = "pipelines" if config.pipelines_near else "stages"
    layers = "+".join(map(str, config.pipeline_stages))
    return f"stages of {layers} layers, {near} on neighbours"


def placing(layout: dict[str, Any]) -> str:
    """What each rank has, in words, from what a checkpoint tells about itself."""
    tensors = layout.get("tensor_parallel", 1)
    words = [f"tp {tensors}"] * (tensors > 1) + [layout["stages_layout"]]
    return f"{layout['world_size']} ranks ({', '.join(words)})"


@contextlib.contextmanager
def names_as_saved(config: DeepSpeedConfig, optimizer: Any, saved_layout: str) -> Iterator[None]:
    """Weights have their model's names, or in a pipeline those of its layers: for a while, those
    of `saved_layout`, by which runtime/base_optimizer.py looks for their files."""
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


def converted(directory: Path, control: Control, rank: int, ranks: int) -> Path:
    """The universal checkpoint made of `directory`; rank 0 makes it if it is not there yet, or if
    its content has changed since, which all ranks compare, each a share.

    All ranks must call this; they ask rank 0 again and again instead of waiting in one collective
    operation, whose time limit a large checkpoint would exceed. Raises LoadFailedError where
    the files are damaged, NoSpaceError where what is made of them finds no room, CheckpointError.
    """
    target = directory / _NAME
    found = control.from_leader("found" if rank == 0 and _is_whole(target) else None)
    if found is not None and _is_as_made(target, control, rank, ranks):
        return target
    converter = _Converter(directory) if rank == 0 else None
    while True:
        told = control.from_leader(converter.state() if converter is not None else "done")
        assert told is not None, "rank 0 always says something"
        if told == "done":
            return target
        if told != "running":
            message = f"cannot convert {directory.name} for other ranks: {told}"
            raise _kind_of(told)(message)
        time.sleep(_POLL_SECONDS)


def _kind_of(told: str) -> type[CheckpointError]:
    if is_full(RuntimeError(told)):
        return NoSpaceError
    return LoadFailedError if _DAMAGE_WORDS.search(told) else CheckpointError


class _Converter:
    """DeepSpeed's converter in a process of its own, which needs neither ranks nor GPUs."""

    def __init__(self, directory: Path) -> None:
        self._partial, self._target = directory / _PARTIAL, directory / _NAME
        shutil.rmtree(self._partial, ignore_errors=True)
        shutil.rmtree(self._target, ignore_errors=True)
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        # --inject_missing_state: it asks for a version that only Megatron-DeepSpeed writes
        command += ["--input_folder", str(directory), "--output_folder", str(self._partial)]
        command += ["--inject_missing_state", "--num_extract_workers", str(_WORKERS)]
        self._log = (directory / f"{_NAME}.log").open("w+b")
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=_environment()
        )

    def state(self) -> str:
        """`running`, `done`, or what went wrong."""
        code = self._process.poll()
        if code is None:
            return "running"
        if code != 0:
            return self._last_words()
        try:
            self._publish()
        except OSError as error:
            return str(error)
        return "done"

    def _publish(self) -> None:
        (self._partial.parent / "latest_universal").unlink(missing_ok=True)
        names = [str(p.relative_to(self._partial)) for p in self._partial.rglob("*.pt")]
        write_rank_digests(self._partial, 0, names)
        os.replace(self._partial, self._target)

    def _last_words(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return text[-_TAIL_CHARACTERS:] or "the converter said nothing"


def _environment() -> dict[str, str]:
    """Without a launcher's variables; on the CPU, for it only rearranges files."""
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**ours, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _is_as_made(target: Path, control: Control, rank: int, ranks: int) -> bool:
    """True on all ranks if every file has the content that an earlier launch has written."""
    files = even_share(read_rank_digests(target), rank, ranks)
    try:
        DigestCheck(target, files, f"rank {rank}").agree(control)
    except BadCheckpointError:
        return False
    return True


def _is_whole(target: Path) -> bool:
    """True if an earlier launch has made it, and nothing has shortened its files since."""
    try:
        files = read_rank_digests(target)
    except (OSError, ValueError):
        return False
    return bool(files) and not any(file_problem(target, one, deep=False) for one in files)
