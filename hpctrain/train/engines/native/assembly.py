"""Entry point of the engines fsdp and ddp: process groups, then everything built on them.

Belongs here: the order of building. Does not belong here: how a part is built.
"""

from __future__ import annotations

from hpctrain.engines.native import NativeConfig
from hpctrain.train.data import open_data, sample_order, timed
from hpctrain.train.engine import Parts
from hpctrain.train.engines.models.tasks import loss_of
from hpctrain.train.engines.native.engine import NativeEngine
from hpctrain.train.engines.native.mesh import NativeMesh, open_mesh
from hpctrain.train.engines.native.optimizer import build_optimizer
from hpctrain.train.engines.native.snapshot import NativeSnapshot
from hpctrain.train.engines.native.wrapping import wrapped_module
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import StepClock


def join(config: NativeConfig, launch: Launch) -> NativeMesh:
    """Join the launch's process groups; all ranks must call this."""
    return open_mesh(config, launch)


def build(job: Job, mesh: NativeMesh, control: Control) -> Parts:
    """Build module, optimizer and data of this rank; all ranks must call this."""
    config = job.config
    assert isinstance(config, NativeConfig)
    # with LoRA a checkpoint holds trainable weights only: the others are loaded or drawn again
    initialize = job.resume_directory is None or config.lora is not None
    module = wrapped_module(config, mesh, initialize=initialize)
    clock = StepClock()
    data = timed(open_data(config, mesh.share, job.data_cache, job.copies), clock)
    engine = NativeEngine(
        config=config,
        mesh=mesh,
        module=module,
        optimizer=build_optimizer(config, module),
        data=data,
        loss=loss_of(config),
        clock=clock,
    )
    module.train()
    return Parts(engine, NativeSnapshot(engine, sample_order(config, data), control))
