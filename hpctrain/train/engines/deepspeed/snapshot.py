"""Save and restore DeepSpeed's own checkpoint files, written by the run's writers.

`mp_rank_00_model_states.pt`, `zero_pp_rank_R_mp_rank_00_optim_states.pt` and so on are in the
checkpoint's directory as DeepSpeed would write them, so that its own tools read them
(`zero_to_fp32`, `ds_to_universal`). Beside them are each rank's random state and, for people,
`about.json`. No file `latest` is written or read. Belongs here: what is in a checkpoint, restoring
it, and converting it for another layout. Does not belong here: processes and publishing (see
`hpctrain.train.saving.saver`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import CheckpointError, InvalidInputError, Problem
from hpctrain.checkpoints.resume_shares import even_share
from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.records.manifest import file_problem, read_rank_digests, write_rank_digests
from hpctrain.train.device import random_state, set_random_state
from hpctrain.train.engine import Form, Position, Writing
from hpctrain.train.engines.deepspeed.engine import PipelineEngine, ZeroEngine, reset_settings
from hpctrain.train.engines.deepspeed.mesh import seed_dropout, silence
from hpctrain.train.engines.deepspeed.pipeline_stages import names_in_stages
from hpctrain.train.engines.models.build import build_module
from hpctrain.train.faults import BadCheckpointError, LoadFailedError, is_full
from hpctrain.train.saving import writer
from hpctrain.train.saving.digest_check import DigestCheck, check_sample_order, damage_named
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.step_agreement import Control
from hpctrain.train.storage import NoSpaceError

# -- Resume with other ranks or other stages, by DeepSpeed's universal checkpoints ---------------
# DeepSpeed's files hold what each rank had; another layout cannot read them. Its converter makes
# one file per weight of them, once: the result stays in the checkpoint's directory, below
# `universal/`, until the checkpoint is retired.


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
    complete = False
    if rank == 0:  # has an earlier launch made it, and has no file been truncated since?
        with contextlib.suppress(OSError, ValueError):
            files = read_rank_digests(target)
            lost = any(file_problem(target, file, deep=False) for file in files)
            complete = bool(files) and not lost
    if control.from_leader(complete):
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
        refuse_unreadable_layout(config, mesh.size, about, directory)
        same = about["zero_stage"] == config.zero_stage and saved == now
        converts = config.zero_stage > 0 and not same
        # read only when a checkpoint is loaded (runtime/engine.py, load_universal_checkpoint)
        engine.inner._config.load_universal_checkpoint = converts
        source = directory
        if converts:
            source = convert(directory, self._control, mesh.rank, mesh.size)
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
