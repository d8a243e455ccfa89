"""Entry point of the engine megatron: process groups, then everything that is built on them.

Installs the CPU layer before anything of megatron-core is imported. Belongs here: the order of
building. Does not belong here: how a part is built.
"""

from __future__ import annotations

import os
from typing import Any

from hpctrain.train import megatron_on_cpu, software

megatron_on_cpu.import_core()

from hpctrain.base.errors import InvalidInputError, Problem  # noqa: E402
from hpctrain.engines.megatron import MegatronConfig  # noqa: E402
from hpctrain.train.data import open_data  # noqa: E402
from hpctrain.train.engine import Parts  # noqa: E402
from hpctrain.train.engines.megatron import fixes  # noqa: E402
from hpctrain.train.engines.megatron.engine import (  # noqa: E402
    LayerGraphs,
    MegatronEngine,
    build_optimizer,
    install_gradient_check,
    prepare_environment,
)
from hpctrain.train.engines.megatron.mesh import MegatronMesh, open_mesh  # noqa: E402
from hpctrain.train.engines.megatron.model import build_model, start_from_weights  # noqa: E402
from hpctrain.train.engines.megatron.option_settings import message_settings  # noqa: E402
from hpctrain.train.engines.megatron.snapshot import MegatronSnapshot  # noqa: E402
from hpctrain.train.job import Job  # noqa: E402
from hpctrain.train.rank_environment import Launch  # noqa: E402
from hpctrain.train.step_agreement import Control  # noqa: E402
from hpctrain.train.times import ComputeTimers, StepClock  # noqa: E402

# From this version on buffers are made for each format of numbers (same function of Megatron-LM).
_FORMATS_SINCE = (2, 7)


def open_userbuffers(config: MegatronConfig) -> None:
    """Make the buffers of the tensor parallel groups; a collective call, before the model is built.

    A buffer has the shape of a layer's input: [tokens of a micro-batch, hidden]. Raises
    InvalidInputError if this TransformerEngine can start userbuffers by MPI only.
    """
    if not config.tp_comm_overlap:
        return
    import transformer_engine_torch as extension
    from transformer_engine.pytorch.module import base

    if extension.ubuf_built_with_mpi():
        raise InvalidInputError(
            [
                Problem(
                    "this TransformerEngine was built with NVTE_UB_WITH_MPI: `tp_comm_overlap` "
                    "would need ranks that MPI starts",
                    hint="use a build without it, or set `engine.megatron.tp_comm_overlap: false`",
                )
            ]
        )
    if not extension.device_supports_multicast():
        # GPUs before Hopper exchange through CUDA IPC instead (module/base.py, initialize_ub)
        os.environ.setdefault("UB_SKIPMC", "1")
    tokens = config.seq_length * config.micro_batch_size // config.context_parallel_size
    eight_bits = config.fp8 is not None
    buffers: dict[str, Any] = dict(use_fp8=eight_bits)
    if software.transformer_engine().is_at_least(_FORMATS_SINCE):
        modes = base.UserBufferQuantizationMode
        buffers = dict(quantization_modes=[modes.FP8 if eight_bits else modes.NONE])
    base.initialize_ub(
        shape=[tokens, config.model.hidden],
        tp_size=config.tensor_model_parallel_size,
        ub_cfgs={},  # TransformerEngine's own choice for each product
        bootstrap_backend=message_settings(config)["tp_comm_bootstrap_backend"],
        **buffers,
    )


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
    data = open_data(config, mesh.share, job.data_cache, job.copies, needed=mesh.reads, clock=clock)
    model.settings.timers = ComputeTimers(clock)
    return Parts(
        MegatronEngine(
            config,
            mesh,
            model,
            optimizer,
            data,
            gradient_check,
            clock,
            LayerGraphs(config, model, optimizer.inner),
        ),
        MegatronSnapshot(config, model, optimizer, control),
    )
