"""`python -m hpctrain.train.engines.megatron.verify TRAIN_JSON`: build a rank of each stage, on no
GPU.

Prints the model that megatron-core built as one JSON document
(`hpctrain.engines.verification.BuiltModel`). The ranks are in a fake process group of the planned
size, and their tensors on the meta device have shapes and no memory. The modules are those that
training uses (`model`). Belongs here: the order of steps and the command line. Does not belong
here: what a model is made of (see `model`), how kept bytes are counted (see `kept_activations`),
comparing (see `hpctrain.engines`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# First of all that imports megatron-core: it puts the CPU layer in force.
import hpctrain.train.engines.megatron.assembly  # noqa: F401  # isort: skip
from megatron.core import parallel_state
from megatron.core.transformer import multi_latent_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpctrain.base.errors import InvalidInputError
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.verification import BuiltModel, BuiltStage
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.train import software
from hpctrain.train.engines.megatron import fixes
from hpctrain.train.engines.megatron.kept_activations import kept_bytes
from hpctrain.train.engines.megatron.mesh import parallel_sizes, seed_everything
from hpctrain.train.engines.megatron.meta_tensors import MetaDeviceMode, flash_attention
from hpctrain.train.engines.megatron.model import build_chunks, transformer_settings
from hpctrain.train.engines.megatron.option_settings import without_gpu_options
from hpctrain.train.engines.megatron.preflight import LATENT_NEEDS_ENGINE
from hpctrain.train.job import read_config


def build(config: MegatronConfig) -> BuiltModel:
    """Build one rank of each stage: tensor, context and data parallel rank 0.

    Raises InvalidInputError for a model that the planned implementation cannot build.
    """
    if config.multi_latent_attention and config.transformer_impl == "local":
        raise InvalidInputError([LATENT_NEEDS_ENGINE])
    fixes.install()
    unmeasured = unmeasured_reason(config)
    engine = config.transformer_impl != "local"
    tokens = config.seq_length // config.context_parallel_size

    # what can be built without a GPU, with the same parameters
    changes: dict[str, object] = {"transformer_impl": "local"}
    remarks = []
    if engine:
        remarks.append("built with megatron-core's own layers: TransformerEngine's need a GPU")
    if config.multi_latent_attention:
        remarks.append("latent attention was arranged from them as TransformerEngine's would be")
    if config.context_parallel_size > 1:
        ranks = config.context_parallel_size * config.data_parallel_size
        changes |= dict(context_parallel_size=1, data_parallel_size=ranks)
        remarks.append("built with cp as part of dp: cp splits no parameters")
    if without_gpu_options(config) != config:
        remarks.append("built in bf16 or fp32 without options that need a GPU")
    buildable = without_gpu_options(config).model_copy(update=changes)

    stages = []
    with _latent_attention(), flash_attention(engine and config.precision != "fp32"):
        for index in range(config.pipeline_model_parallel_size):
            with _fake_rank(buildable, index) as rank, MetaDeviceMode():
                settings = transformer_settings(buildable, compiled=True, on_meta=True)
                chunks = build_chunks(buildable, settings)
                stages.append(
                    BuiltStage(
                        index=index,
                        rank=rank,
                        parameters=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
                        kept_bytes=None if unmeasured else kept_bytes(buildable, chunks, tokens),
                    )
                )
            del settings, chunks
    return BuiltModel(
        megatron_core_version=software.megatron_core() or "unknown",
        torch_version=torch.__version__,
        stages=tuple(stages),
        remarks=(*remarks, *([unmeasured] if unmeasured else [])),
    )


def unmeasured_reason(config: MegatronConfig) -> str | None:
    """Return why kept bytes are not measured; None if they are."""
    if config.num_moe_experts is not None:
        return "activations are not measured: how many tokens an expert gets is not known here"
    if config.multi_latent_attention or config.mtp_num_layers:
        return "activations are not measured with latent attention or prediction layers"
    return None


@contextmanager
def _fake_rank(config: MegatronConfig, stage: int) -> Iterator[int]:
    """Make this process the first rank of a stage; collectives return at once and move nothing."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    replicas = config.data_parallel_size  # context parallel ranks were made part of them
    inner = replicas if config.parallel_order == DEFAULT_ORDER else 1
    rank = stage * tp * inner
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp * replicas)
    try:
        parallel_state.initialize_model_parallel(
            **parallel_sizes(config), create_gloo_process_groups=False
        )
        assert parallel_state.get_pipeline_model_parallel_rank() == stage
        seed_everything(config)
        yield rank
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _latent_attention() -> Iterator[None]:
    """Build latent attention from megatron-core's own layers, as TransformerEngine's would be.

    Its down projections are "duplicated" over tensor parallel ranks (multi_latent_attention.py,
    q_down_proj_kwargs): a column-parallel layer over a group of one rank has the same weight. Its
    core attention takes two head sizes and has no parameters. Where TransformerEngine is missing,
    the name of its linear layers' class is bound to an object that isinstance does not take.
    """
    original, linear = multi_latent_attention.build_module, multi_latent_attention.TELinear

    def build_module(*args: Any, **keywords: Any) -> Any:
        if keywords.get("tp_comm_buffer_name") in ("q_down_proj", "kv_down_proj"):
            keywords["tp_group"] = dist.new_group([dist.get_rank()])
        sizes = ("k_channels", "v_channels")
        return original(*args, **{k: v for k, v in keywords.items() if k not in sizes})

    multi_latent_attention.build_module = build_module
    multi_latent_attention.TELinear = linear if isinstance(linear, type) else _NoLinear
    try:
        yield
    finally:
        multi_latent_attention.build_module = original
        multi_latent_attention.TELinear = linear


class _NoLinear:
    """A class without instances."""


def main(argv: Sequence[str]) -> int:
    """Print only the document to stdout; returns 0, or the exit code of an error on stderr."""
    gc.freeze()  # imported objects stay: collecting through them for each stage takes seconds
    try:
        with redirect_stdout(sys.stderr):
            config = read_config(Path(argv[0]))
            assert isinstance(config, MegatronConfig), "only megatron-core's models are verified"
            built = build(config)
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(built.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
