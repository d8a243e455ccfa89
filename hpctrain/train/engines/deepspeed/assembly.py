"""Entry point of the engine deepspeed: process groups, then everything that is built on them.

Belongs here: the order of building. Does not belong here: how a part is built.
"""

from __future__ import annotations

from typing import Any

from deepspeed.utils import groups

from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.train.data import open_data, sample_order, timed
from hpctrain.train.engine import Parts
from hpctrain.train.engines.deepspeed import library
from hpctrain.train.engines.deepspeed.engine import ZeroEngine
from hpctrain.train.engines.deepspeed.mesh import DeepSpeedMesh, open_mesh
from hpctrain.train.engines.deepspeed.module import placed_module, staged_module
from hpctrain.train.engines.deepspeed.operators import build_operators
from hpctrain.train.engines.deepspeed.optimizer import parameter_groups
from hpctrain.train.engines.deepspeed.pipeline import PipelineEngine
from hpctrain.train.engines.deepspeed.snapshot import DeepSpeedSnapshot
from hpctrain.train.engines.deepspeed.tensor_parallel import token_losses_of
from hpctrain.train.engines.models.tasks import loss_of
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import StepClock


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
    if config.pipeline_stages:
        module = staged_module(config, mesh, initialize=job.resume_directory is None)
        data = open_data(config, mesh.share, job.data_cache, job.copies, needed=mesh.reads)
        engine = PipelineEngine(
            config=config,
            mesh=mesh,
            inner=_initialize(config, module),
            data=timed(data, clock),
            clock=clock,
        )
    else:
        # with LoRA a checkpoint holds trainable weights only: the others are loaded or drawn again
        initialize = job.resume_directory is None or config.lora is not None
        module = placed_module(config, mesh, initialize=initialize)
        engine = ZeroEngine(
            config=config,
            mesh=mesh,
            inner=_initialize(config, module, mpu=groups if mesh.tensors is not None else None),
            data=timed(open_data(config, mesh.share, job.data_cache, job.copies), clock),
            loss=loss_of(config, token_losses_of(mesh.tensors, config.vocab_size)),
            clock=clock,
        )
    return Parts(engine, DeepSpeedSnapshot(engine, sample_order(config, engine.data), control))


def _initialize(config: DeepSpeedConfig, module: Any, mpu: Any = None) -> Any:
    """Return DeepSpeed's engine for the module.

    `mpu`: the object from which DeepSpeed reads groups. Without one all ranks are replicas; a
    pipeline has its own.
    """
    inner = library.initialize(
        model=module,
        model_parameters=parameter_groups(config, module),
        config=ds_config(config),
        mpu=mpu,
        dist_init_required=False,
    )
    inner.train()
    return inner
