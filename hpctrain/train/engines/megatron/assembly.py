"""Entry point of the engine megatron: process groups, then everything that is built on them.

Installs the CPU layer before anything of megatron-core is imported. Belongs here: the order of
building. Does not belong here: how a part is built.
"""

from __future__ import annotations

from hpctrain.train import megatron_on_cpu

megatron_on_cpu.import_core()

from hpctrain.engines.megatron import MegatronConfig  # noqa: E402
from hpctrain.train.data import open_data, timed  # noqa: E402
from hpctrain.train.engine import Parts  # noqa: E402
from hpctrain.train.engines.megatron import fixes  # noqa: E402
from hpctrain.train.engines.megatron.cuda_graphs import (  # noqa: E402
    LayerGraphs,
    prepare_environment,
)
from hpctrain.train.engines.megatron.engine import MegatronEngine  # noqa: E402
from hpctrain.train.engines.megatron.forward import GlobalBatchPass  # noqa: E402
from hpctrain.train.engines.megatron.gradient_check import install_gradient_check  # noqa: E402
from hpctrain.train.engines.megatron.mesh import MegatronMesh, open_mesh  # noqa: E402
from hpctrain.train.engines.megatron.model import build_model  # noqa: E402
from hpctrain.train.engines.megatron.optimizer import build_optimizer  # noqa: E402
from hpctrain.train.engines.megatron.pretrained_weights import start_from_weights  # noqa: E402
from hpctrain.train.engines.megatron.snapshot import MegatronSnapshot  # noqa: E402
from hpctrain.train.engines.megatron.userbuffers import open_userbuffers  # noqa: E402
from hpctrain.train.job import Job  # noqa: E402
from hpctrain.train.rank_environment import Launch  # noqa: E402
from hpctrain.train.step_agreement import Control  # noqa: E402
from hpctrain.train.times import ComputeTimers, StepClock  # noqa: E402


def join(config: MegatronConfig, launch: Launch) -> MegatronMesh:
    """Join the launch's process groups; all ranks must call this."""
    fixes.install()
    prepare_environment(config)
    mesh = open_mesh(config, launch)
    open_userbuffers(config)
    return mesh


def build(job: Job, mesh: MegatronMesh, control: Control) -> Parts:
    """Build model, optimizer and data of this rank; all ranks must call this."""
    config = job.config
    assert isinstance(config, MegatronConfig)
    gradient_check = install_gradient_check()
    begins = job.resume_directory is None
    model = build_model(config, mesh, initialize=begins and config.pretrained is None)
    start_from_weights(config, model, loads=begins)
    optimizer = build_optimizer(config, model)
    clock = StepClock()
    data = timed(
        open_data(config, mesh.share, job.data_cache, job.copies, needed=mesh.reads), clock
    )
    model.settings.timers = ComputeTimers(clock)
    runner = GlobalBatchPass(config, mesh, model)
    return Parts(
        MegatronEngine(
            runner,
            optimizer,
            data,
            gradient_check,
            clock,
            LayerGraphs(config, model, optimizer.inner),
        ),
        MegatronSnapshot(config, model, optimizer, control),
    )
