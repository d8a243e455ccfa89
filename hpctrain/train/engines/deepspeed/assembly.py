"""Entry point of the engine deepspeed: process groups, then everything that is built on them.

Belongs here: the order of building, weights and where they are placed, compiled operators. Does not
belong here: the model itself (see `hpctrain.train.engines.models`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.train.data import open_data, sample_order
from hpctrain.train.engine import Parts
from hpctrain.train.engines.deepspeed.engine import (
    PipelineEngine,
    ZeroEngine,
    mean_loss_of,
)
from hpctrain.train.engines.deepspeed.mesh import DeepSpeedMesh, open_mesh, silence
from hpctrain.train.engines.deepspeed.pipeline_stages import StagedModel
from hpctrain.train.engines.deepspeed.snapshot import DeepSpeedSnapshot
from hpctrain.train.engines.deepspeed.tensor_parallel import split_weights, token_losses_of
from hpctrain.train.engines.models.allocation import (
    allocate,
    broadcast_buffers,
    replace_meta_parameters,
    set_buffers,
)
from hpctrain.train.engines.models.build import (
    build_module,
    build_on_meta,
    enable_recomputation,
    starts_whole,
)
from hpctrain.train.engines.models.tasks import loss_of
from hpctrain.train.initial_weights import initial_weight, unwritten_memory
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.schedule import parameter_groups
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import StepClock

# -- Build DeepSpeed's compiled operators once per node, before any rank needs them --------------
# torch builds an extension below a file `lock` that a killed build leaves behind, and then waits
# for it forever (torch/utils/cpp_extension.py and file_baton.py). Its default place is the home
# directory, which nodes with other CPUs share although the code is compiled for this one
# (-march=native).


_DIRECTORY_VARIABLE = "TORCH_EXTENSIONS_DIR"


def build_operators(config: DeepSpeedConfig) -> None:
    """Load what the run's offload needs, one rank of a node after the other; the first builds.

    Raises InvalidInputError if an operator cannot be built.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    builders: dict[str, Any] = {}
    if not config.torch_adam:
        builders["DeepSpeed's Adam for offloaded state"] = CPUAdamBuilder()
    if config.nvme_path is not None:
        builders["DeepSpeed's access to NVMe"] = AsyncIOBuilder()
    if not builders:
        return
    root = extensions_directory()
    os.environ[_DIRECTORY_VARIABLE] = str(root)
    with exclusive_build(root):
        for title, builder in builders.items():
            try:
                builder.load(verbose=False)
            except Exception as error:
                message = f"{title} cannot be built here: {type(error).__name__}: {error}"
                hint = "load a CUDA toolkit and a C++ compiler"
                if builder.NAME == "cpu_adam":
                    hint += ", or set `engine.deepspeed.adam: torch`"
                raise InvalidInputError(
                    [Problem(message, hint=hint, node_dependent=True)]
                ) from None


def extensions_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's TORCH_EXTENSIONS_DIR, else a private directory on this node.

    Someone else's directory of that name in /tmp is not used: code is loaded from there.
    """
    given = environment.get(_DIRECTORY_VARIABLE)
    if given:
        return Path(given)
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    own = Path(tempfile.gettempdir(), f"hpctrain-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    status = own.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or own.is_symlink():
        own = Path(tempfile.mkdtemp(prefix="hpctrain-"))
    return own / f"torch-{torch.__version__}-{python}"


@contextlib.contextmanager
def exclusive_build(root: Path) -> Iterator[None]:
    """Let no other rank of this user build below `root`, and remove what a killed build has left.

    The kernel releases this lock with the process that holds it, so it cannot be left behind.
    """
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".hpctrain-build", "a", encoding="ascii") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for stale in root.glob("*/lock"):
            stale.unlink(missing_ok=True)
        yield


# -- Build the module of this rank: whole, sharded from the start (ZeRO stage 3), or one stage ---


def placed_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool) -> Any:
    """Build the module that `deepspeed.initialize` takes; all ranks must call this.

    `initialize` False: weights stay unset, because a checkpoint will be loaded.
    """
    if mesh.tensors is not None:
        module, draws = _split_module(config, mesh, initialize=initialize)
        allocate(module, mesh.device, draw=draws)
        module = module.to(mesh.device)
    elif config.zero_stage < 3:
        module = build_module(config, device=mesh.device, initialize=initialize)
    elif initialize and starts_whole(config):
        module = _received_module(config, mesh)
    else:
        module = _sharded_module(config, mesh, draw=initialize)
    enable_recomputation(config, module)
    return module


def staged_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool) -> Any:
    """Build the layers of this rank's stage; the others never have memory, or are dropped while
    still on the host."""
    module, draws = _split_module(config, mesh, initialize=initialize)
    enable_recomputation(config, module)
    losses = token_losses_of(mesh.tensors, config.vocab_size)
    with silence():
        return StagedModel(config, module, mean_loss_of(losses), device=mesh.device, draw=draws)


def _split_module(
    config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, initialize: bool
) -> tuple[Any, bool]:
    """Return the model with this rank's part of split weights, and whether to draw them.

    It is on the meta device, but with initial weights that exist for whole models only on the host.
    """
    draws = initialize and not starts_whole(config)
    if initialize and not draws:
        module = build_module(config, device=torch.device("cpu"))
    else:
        module = build_on_meta(config, record=draws)
    if mesh.tensors is not None:
        split_weights(module, mesh.tensors)
    return module, draws


class _DrawnParts(deepspeed.zero.Init):
    """Divides weights among the ranks, each of which draws its own part."""

    def __init__(
        self, module: Any, config: DeepSpeedConfig, dtype: torch.dtype, *, draw: bool
    ) -> None:
        self._draw = draw
        super().__init__(module=module, config_dict_or_path=ds_config(config), dtype=dtype)

    def _zero_init_param(self, param: Any) -> None:
        """Replace the method that sends rank 0's weight (runtime/zero/partition_parameters.py)."""
        self._convert_to_deepspeed_param(param)
        # memory for a whole weight, of which this rank writes its own part only
        with unwritten_memory():
            param.data = torch.empty(param.ds_shape, dtype=param.dtype, device=param.device)
        size = self._aligned_size(param) // self._partition_world_size(param)
        first = size * self._partition_rank(param)
        part = param.data.view(-1)[first : first + size]
        if self._draw:
            initial_weight(param).draw_range(part, first)
        param.partition()


def _sharded_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh, *, draw: bool) -> Any:
    """Shard the weights one by one; each rank draws its part, and has the memory of these only."""
    module = build_on_meta(config, record=draw)
    dtype = _dtype(config)

    def memory_of(old: Any) -> torch.Tensor:
        return torch.empty(1, dtype=dtype, device=mesh.device).expand(old.shape)

    replace_meta_parameters(module, memory_of)
    set_buffers(module, dict(module.named_buffers()), mesh.device)
    return _DrawnParts(module, config, dtype, draw=draw).module


def _received_module(config: DeepSpeedConfig, mesh: DeepSpeedMesh) -> Any:
    """Shard the weights one by one while rank 0 sends them.

    Rank 0 alone reads them. No rank ever has the whole model on its GPU, and only one process has
    it on the host.
    """
    if mesh.rank == 0:
        module = build_module(config, device=torch.device("cpu"))
    else:
        module = build_on_meta(config, record=False)
        # The host allocates the memory of a weight when it is written: not before rank 0's weight
        # arrives, and then it is sharded.
        replace_meta_parameters(module, lambda old: torch.empty_like(old, device="cpu"))
    buffers = dict(module.named_buffers())
    broadcast_buffers(module, buffers, rank=mesh.rank, group=mesh.control, device=mesh.device)
    dtype = _dtype(config)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return deepspeed.zero.Init(
        module=module, config_dict_or_path=ds_config(config), dtype=dtype
    ).module


def _dtype(config: DeepSpeedConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


# -- Entry point of the engine deepspeed: process groups, then everything that is built on them --


def join(config: DeepSpeedConfig, launch: Launch) -> DeepSpeedMesh:
    """Join the launch's process groups; all ranks must call this."""
    return open_mesh(config, launch)


def build(job: Job, mesh: DeepSpeedMesh, control: Control) -> Parts:
    """Build module, optimizer and data of this rank; all ranks must call this."""
    config = job.config
    assert isinstance(config, DeepSpeedConfig)
    build_operators(config)
    clock = StepClock()
    engine: ZeroEngine | PipelineEngine
    # with LoRA a checkpoint holds trainable weights only: the others are loaded or drawn again
    initialize = job.resume_directory is None or config.lora is not None
    if config.pipeline_stages:
        module, mpu = staged_module(config, mesh, initialize=initialize), None
    else:
        module = placed_module(config, mesh, initialize=initialize)
        mpu = groups if mesh.tensors is not None else None
    parts: dict[str, Any] = dict(
        config=config,
        mesh=mesh,
        inner=_initialize(config, module, mpu),
        data=open_data(
            config, mesh.share, job.data_cache, job.copies, needed=mesh.reads, clock=clock
        ),
        clock=clock,
    )
    if config.pipeline_stages:
        engine = PipelineEngine(**parts)
    else:
        losses = token_losses_of(mesh.tensors, config.vocab_size)
        engine = ZeroEngine(loss=loss_of(config, losses), **parts)
    return Parts(engine, DeepSpeedSnapshot(engine, sample_order(config, engine.data), control))


def _initialize(config: DeepSpeedConfig, module: Any, mpu: Any = None) -> Any:
    """Return DeepSpeed's engine for the module.

    `mpu`: the object from which DeepSpeed reads groups. Without one all ranks are replicas; a
    pipeline has its own.
    """
    with silence():
        inner = deepspeed.initialize(
            model=module,
            model_parameters=parameter_groups(config, module),
            config=ds_config(config),
            mpu=mpu,
            dist_init_required=False,
        )[0]
    inner.train()
    return inner
