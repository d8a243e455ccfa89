"""megatron-core's room from outside: process groups, then everything that is built on them.

Puts the CPU layer in force before anything of megatron-core is imported. Belongs here: the order
of building. Does not belong here: how anything is built.
"""

from __future__ import annotations

from hpctrain.train import megatron_on_cpu

megatron_on_cpu.install()

from hpctrain.engines.megatron import MegatronConfig  # noqa: E402
from hpctrain.train.data import open_data, timed  # noqa: E402
from hpctrain.train.engine import Parts  # noqa: E402
from hpctrain.train.engines.megatron import fixes  # noqa: E402
from hpctrain.train.engines.megatron.engine import MegatronEngine  # noqa: E402
from hpctrain.train.engines.megatron.forward import Pass  # noqa: E402
from hpctrain.train.engines.megatron.mesh import Mesh, open_mesh  # noqa: E402
from hpctrain.train.engines.megatron.model import build_model  # noqa: E402
from hpctrain.train.engines.megatron.optimizer import build_optimizer  # noqa: E402
from hpctrain.train.engines.megatron.snapshot import Snapshot  # noqa: E402
from hpctrain.train.engines.megatron.pretrained_weights import start_from_weights  # noqa: E402
from hpctrain.train.engines.megatron.gradient_check import install_witness  # noqa: E402
from hpctrain.train.job import Job  # noqa: E402
from hpctrain.train.rank_environment import Launch  # noqa: E402
from hpctrain.train.step_agreement import Control  # noqa: E402
from hpctrain.train.times import ComputeTimers, StepClock  # noqa: E402


def join(config: MegatronConfig, launch: Launch) -> Mesh:
    """Join the launch's process groups; all ranks must call this."""
    fixes.install()
    return open_mesh(config, launch)


def build(job: Job, mesh: Mesh, control: Control) -> Parts:
    """Model, optimizer and data of this rank; all ranks must call this."""
    config = job.config
    assert isinstance(config, MegatronConfig)
    witness = install_witness()
    begins = job.resume_directory is None
    model = build_model(config, mesh, initialize=begins and config.pretrained is None)
    start_from_weights(config, model, loads=begins)
    optimizer = build_optimizer(config, model)
    clock = StepClock()
    data = timed(open_data(config, mesh.share, job.data_cache, needed=mesh.reads), clock)
    model.settings.timers = ComputeTimers(clock)
    runner = Pass(config, mesh, model)
    return Parts(
        MegatronEngine(runner, optimizer, data, witness, clock),
        Snapshot(config, model, optimizer, control),
    )
