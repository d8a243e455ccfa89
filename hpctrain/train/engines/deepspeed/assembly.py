"""The way into the room: process groups, then everything that is built on them.

Belongs here: the order of building. Does not belong here: how anything is built.
"""

from __future__ import annotations

from typing import Any

from deepspeed.utils import groups

from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.train.data import open_data, sample_order, timed
from hpctrain.train.engine import Parts
from hpctrain.train.engines.deepspeed import library
from hpctrain.train.engines.deepspeed.engine import ZeroEngine
from hpctrain.train.engines.deepspeed.flops import FlopsCounter
from hpctrain.train.engines.deepspeed.mesh import Mesh, open_mesh
from hpctrain.train.engines.deepspeed.module import placed_module, staged_module
from hpctrain.train.engines.deepspeed.optimizer import parameter_groups
from hpctrain.train.engines.deepspeed.pipeline import PipelineEngine
from hpctrain.train.engines.deepspeed.snapshot import Snapshot
from hpctrain.train.engines.deepspeed.tensor_parallel import words_of
from hpctrain.train.engines.models.tasks import loss_of
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import StepClock


def join(config: DeepSpeedConfig, launch: Launch) -> Mesh:
    """Join the launch's process groups; all ranks must call this."""
    return open_mesh(config, launch)


def build(job: Job, mesh: Mesh, control: Control) -> Parts:
    """Module, optimizer and data of this rank; all ranks must call this."""
    config = job.config
    assert isinstance(config, DeepSpeedConfig)
    if not config.torch_adam:
        library.refuse_without_adam()
    kind = _pipeline if config.pipeline_stages else _whole
    engine = kind(job, config, mesh)
    return Parts(engine, Snapshot(engine, sample_order(config, engine.data), control))


def _whole(job: Job, config: DeepSpeedConfig, mesh: Mesh) -> ZeroEngine:
    # with LoRA a checkpoint holds what is learned only: the rest comes from where it came from
    initialize = job.resume_directory is None or config.lora is not None
    module = placed_module(config, mesh, initialize=initialize)
    clock = StepClock()
    return ZeroEngine(
        config=config,
        mesh=mesh,
        inner=_initialized(config, module, mpu=groups if mesh.tensors is not None else None),
        data=timed(open_data(config, mesh.share, job.data_cache), clock),
        loss=loss_of(config, words_of(mesh.tensors, config.vocab_size)),
        flops=FlopsCounter(module, config.flops_steps, job.run.flops if mesh.rank == 0 else None),
        clock=clock,
    )


def _pipeline(job: Job, config: DeepSpeedConfig, mesh: Mesh) -> PipelineEngine:
    module = staged_module(config, mesh, initialize=job.resume_directory is None)
    clock = StepClock()
    return PipelineEngine(
        config=config,
        mesh=mesh,
        inner=_initialized(config, module),
        data=timed(open_data(config, mesh.share, job.data_cache, needed=mesh.reads), clock),
        clock=clock,
    )


def _initialized(config: DeepSpeedConfig, module: Any, mpu: Any = None) -> Any:
    """`mpu`: whom DeepSpeed asks for groups; without one all ranks are replicas, and a pipeline
    brings its own."""
    inner = library.initialize(
        model=module,
        model_parameters=parameter_groups(config, module),
        config=ds_config(config),
        mpu=mpu,
        dist_init_required=False,
    )
    inner.train()
    return inner
