"""The way into the room: process groups, then everything that is built on them.

Belongs here: the order of building. Does not belong here: how anything is built.
"""

from __future__ import annotations

from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.train.control import Control
from hpctrain.train.data import open_data, sample_order, timed
from hpctrain.train.deepspeed import library
from hpctrain.train.deepspeed.engine import ZeroEngine
from hpctrain.train.deepspeed.flops import FlopsCounter
from hpctrain.train.deepspeed.mesh import Mesh, open_mesh
from hpctrain.train.deepspeed.module import placed_module
from hpctrain.train.deepspeed.optimizer import parameter_groups
from hpctrain.train.deepspeed.snapshot import Snapshot
from hpctrain.train.engine import Parts
from hpctrain.train.job import Job
from hpctrain.train.launch import Launch
from hpctrain.train.models.tasks import loss_of
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
    # with LoRA a checkpoint holds what is learned only: the rest comes from where it came from
    initialize = job.resume_directory is None or config.lora is not None
    module = placed_module(config, mesh, initialize=initialize)
    inner = library.initialize(
        model=module,
        model_parameters=parameter_groups(config, module),
        config=ds_config(config),
        dist_init_required=False,
    )
    inner.train()
    clock = StepClock()
    data = timed(open_data(config, mesh.share, job.data_cache), clock)
    engine = ZeroEngine(
        config=config,
        mesh=mesh,
        inner=inner,
        data=data,
        loss=loss_of(config),
        flops=FlopsCounter(module, config.flops_steps, job.run.flops if mesh.rank == 0 else None),
        clock=clock,
    )
    return Parts(engine, Snapshot(engine, sample_order(config, data), control))
