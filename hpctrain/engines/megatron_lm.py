"""An external Megatron-LM: from spec and plan to the arguments of its `pretrain_gpt.py`.

`MegatronLmConfig` is a `MegatronConfig` with the checkout that trains it; `arguments` renders it.
Names are those that both Megatron-LM core_v0.16 and its main line accept
(megatron/training/arguments.py). Belongs here: the document and the rendering. Does not belong
here: arguments that a spec may not set (see `hpctrain.spec.engines.megatron_lm`), starting the
program (see `hpctrain.train.engines.megatron_lm`), reading files.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpctrain.engines.megatron import MegatronConfig, core_fields, megatron_config, position_kind
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.spec.engines.megatron import WGRAD_DEFERRAL_LIMIT
from hpctrain.spec.engines.megatron_lm import MEGATRON_LM_ENTRY, ArgumentValue
from hpctrain.spec.model import ModelSpec

if TYPE_CHECKING:
    from hpctrain.plan.job import TrainingJob

Arguments = dict[str, ArgumentValue | None]


class MegatronLmConfig(MegatronConfig):
    """The configuration of Megatron-LM in megatron-core's names, and its checkout.

    `extra_arguments` are the user's own: name without dashes, and value.
    """

    engine: Literal["megatron-lm"] = "megatron-lm"
    checkout: str
    entry: str = MEGATRON_LM_ENTRY
    extra_arguments: dict[str, ArgumentValue] = Field({})
    optimizer_cpu_offload: bool = False
    optimizer: Literal["adam", "muon"] = "adam"
    muon_momentum: float = 0.95

    @property
    def computes_on_host(self) -> bool:
        return self.optimizer_cpu_offload

    @property
    def checkout_directory(self) -> str | None:
        return self.checkout

    @property
    def needed_paths(self) -> tuple[str, ...]:
        """The program in the checkout."""
        return (str(PurePath(self.checkout, self.entry)),)


@dataclass(frozen=True)
class Places:
    """Directories of one launch. `load` with `load_step`: the checkpoint to resume from."""

    save: str
    data_cache: str
    load: str | None = None
    load_step: int | None = None


def megatron_lm_config(job: TrainingJob) -> MegatronLmConfig:
    """Fill the document of engine `megatron-lm` from a plan."""
    engine = job.spec.engine
    assert engine.checkout is not None, "the spec was checked for a checkout"
    return MegatronLmConfig(
        **dict(megatron_config(job)),
        checkout=engine.checkout,
        entry=engine.entry,
        extra_arguments=engine.arguments,
        optimizer_cpu_offload=job.plan.offload == "cpu",
        optimizer="muon" if job.spec.optimizer.kind == "muon" else "adam",
        muon_momentum=job.spec.optimizer.momentum,
    )


def arguments(
    config: MegatronLmConfig, places: Places, *, on_cpu: bool = False, ramps_up: bool = True
) -> tuple[str, ...]:
    """Render the arguments of `pretrain_gpt.py`. `on_cpu`: for a trial on a machine without GPUs.

    `ramps_up`: the checkout reads `--rampup-batch-size`; the main line of 2026 ignores it.

    The user's own arguments override the defaults.
    """
    named: Arguments = {
        **_model(config),
        **_layout(config),
        **_settings(config),
        **_batches(config, ramps_up=ramps_up),
        **_training(config),
        **_data(config, places),
        **_checkpoints(config, places),
        # the log then shows that the run is alive; the log of hpctrain gets fewer lines
        "log-interval": 1,
        **(_CPU if on_cpu else {}),
        **config.extra_arguments,
    }
    rendered: list[str] = []
    for name, value in named.items():
        if isinstance(value, tuple):
            rendered += (f"--{name}", *map(str, value))
        elif value is True:
            rendered.append(f"--{name}")
        elif value is not None and value is not False:
            # with `=`, a value that begins with a dash is not parsed as a name
            rendered.append(f"--{name}={value}")
    return tuple(rendered)


# gloo and nothing fused: works without CUDA, TransformerEngine and Apex
_CPU: Arguments = {
    "transformer-impl": "local",
    "distributed-backend": "gloo",
    "no-gradient-accumulation-fusion": True,
    "no-masked-softmax-fusion": True,
    "no-bias-gelu-fusion": True,
    "no-bias-swiglu-fusion": True,
    "no-bias-dropout-fusion": True,
    "no-persist-layer-norm": True,
    "no-rope-fusion": True,
    "use-cpu-initialization": True,
}


def _same(config: MegatronLmConfig, *fields: str) -> Arguments:
    """Arguments that have the names of these fields."""
    return {name.replace("_", "-"): getattr(config, name) for name in fields}


# Fields of TransformerConfig that are no arguments of the same name, or none that says the default.
# `softmax_scale` is no argument at all, and refused (`trainable_megatron_lm`).
_OTHERWISE = (
    "softmax_scale",
    *("normalization", "layernorm_epsilon", "gated_linear_unit", "softmax_type"),
    *("num_query_groups", "kv_channels", "add_bias_linear", "moe_layer_freq", "rope_type"),
    *("layernorm_zero_centered_gamma", "attention_output_gate", "rotary_base", "num_moe_experts"),
)


def _model(config: MegatronLmConfig) -> Arguments:
    """Name the parts of the model, and dropless routing over an all-to-all as in hpctrain's own
    trainer."""
    model = config.model
    fields = core_fields(model)
    latent, grouped = model.mla is not None, model.key_value_heads != model.heads
    rotary = model.positions == "rope"
    arguments: Arguments = {}
    for name in (name for name in fields if name not in _OTHERWISE):
        value = fields[name]
        if isinstance(value, tuple):  # as arguments.py reads them: `--window-size=127,0`
            value = ",".join(map(str, value))
        elif isinstance(value, list):  # `--no-rope-freq=[0,1]`
            value = str(value).replace(" ", "")
        arguments[name.replace("_", "-")] = value
    arguments |= {
        "group-query-attention": grouped and not latent,
        "num-query-groups": model.key_value_heads if grouped and not latent else None,
        "kv-channels": None if latent else model.head_size,
        "seq-length": config.seq_length,
        "max-position-embeddings": model.max_seq or config.seq_length,
        "position-embedding-type": position_kind(model),
        # a whole number, for arguments.py reads no other
        "rotary-base": round(model.rope_base) if rotary else None,
        "rotary-percent": model.rotates.partial if rotary and model.rotates.partial < 1 else None,
        **_rope_scaling(model),
        "softmax-type": fields["softmax_type"] if model.attends.sinks else None,
        "attention-output-gate": model.attends.gate,
        "normalization": fields["normalization"],
        "apply-layernorm-1p": model.norm_zero_centered,
        "norm-epsilon": model.norm_epsilon,
        "untie-embeddings-and-output-weights": not model.tied,
        "disable-bias-linear": not model.mlp_bias,
        "attention-softmax-in-fp32": True,
        "transformer-impl": None if config.transformer_impl == "auto" else config.transformer_impl,
        "swiglu": model.activation == "swiglu",
        "squared-relu": model.activation == "squared_relu",
        # the fused bias is one of GELU or SwiGLU (transformer_config.py)
        "no-bias-gelu-fusion": model.activation == "squared_relu" and model.mlp_bias,
        # GELU with a bias is fused, and already approximated with tanh (fusions/fused_bias_gelu.py)
        "openai-gelu": model.activation == "gelu_tanh" and not model.mlp_bias,
    }
    if model.moe is not None:
        runs = itertools.groupby(fields["moe_layer_freq"])
        pattern = "+".join(f"[{kind}]*{len(list(same))}" for kind, same in runs)
        arguments["num-experts"] = model.moe.experts
        arguments["moe-layer-freq"] = f"({pattern})"
        arguments["moe-token-dispatcher-type"] = config.moe_token_dispatcher_type
    if latent:
        arguments["rope-type"] = fields["rope_type"]
        arguments["no-rope-fusion"] = True  # transformer_config.py: with YaRN only
    return arguments


def _rope_scaling(model: ModelSpec) -> Arguments:
    """Scale rotary positions; latent attention has fields of its own for it."""
    scaling = model.rotates.scaling
    if scaling is None or model.mla is not None:
        return {}
    if scaling.kind == "linear":
        return {"rotary-seq-len-interpolation-factor": round(scaling.factor)}
    return {"use-rope-scaling": True, "rope-scaling-factor": scaling.factor}


def _layout(config: MegatronLmConfig) -> Arguments:
    uneven = stage_layout(config.pipeline_layer_split, config.model.mtp_layers)
    experts = config.model.moe is not None
    return {
        **_same(config, "tensor_model_parallel_size", "pipeline_model_parallel_size"),
        "pipeline-model-parallel-layout": uneven,
        "num-virtual-stages-per-pipeline-rank": (
            None if uneven else config.virtual_pipeline_model_parallel_size
        ),
        "context-parallel-size": config.context_parallel_size,
        "expert-model-parallel-size": config.expert_model_parallel_size if experts else None,
        "expert-tensor-parallel-size": config.expert_tensor_ranks if experts else None,
        "use-tp-pp-dp-mapping": config.parallel_order != DEFAULT_ORDER,
        "sequence-parallel": config.sequence_parallel,
    }


def _settings(config: MegatronLmConfig) -> Arguments:
    """Name what `engine.megatron` chooses; values that are the default are left out."""
    instances, sizes = (
        config.num_distributed_optimizer_instances,
        config.hierarchical_context_parallel_sizes,
    )
    # arguments.py: an offload must be used in conjunction with it
    aware = config.use_precision_aware_optimizer or config.optimizer_cpu_offload
    types = _same(config, "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
    flex = config.moe_token_dispatcher_type == "flex"
    return {
        **_same(config, "tp_comm_overlap", "cross_entropy_loss_fusion"),
        **_same(config, "defer_embedding_wgrad_compute", "calculate_per_token_loss"),
        **_same(config, "moe_permute_fusion", "moe_shared_expert_overlap"),
        "moe-flex-dispatcher-backend": config.moe_flex_dispatcher_backend if flex else None,
        # userbuffers are started without MPI, as by engine megatron
        "tp-comm-bootstrap-backend": "nccl" if config.tp_comm_overlap else None,
        "wgrad-deferral-limit": (
            WGRAD_DEFERRAL_LIMIT if config.defer_embedding_wgrad_compute else None
        ),
        # `local` is for `--spec local` only (arguments.py), and comes with `--transformer-impl`
        "attention-backend": (
            None if config.attention_backend in ("auto", "local") else config.attention_backend
        ),
        "hierarchical-context-parallel-sizes": sizes,
        "cp-comm-type": None if sizes is None else "a2a+p2p",
        "num-distributed-optimizer-instances": instances if instances > 1 else None,
        "grad-reduce-in-bf16": not config.grad_reduce_in_fp32,
        "use-precision-aware-optimizer": aware,
        **{name: kind for name, kind in types.items() if kind != "fp32"},
        "main-grads-dtype": "bf16" if aware and not config.grad_reduce_in_fp32 else None,
    }


def stage_layout(split: tuple[tuple[int, ...], ...], prediction_layers: int) -> str | None:
    """Format Megatron's stage layout of an uneven split; None for an even one.

    `E` is the embedding, `t` a layer, `m` a prediction layer, `L` the loss. The first chunks of all
    stages come before the second ones (pipeline_parallel_layer_layout.py).
    """
    if len({layers for stage in split for layers in stage}) == 1:
        return None
    stages = ["t" * stage[chunk] for chunk in range(len(split[0])) for stage in split]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}{'m' * prediction_layers}L"
    return "|".join(stages)


def _training(config: MegatronLmConfig) -> Arguments:
    """Set batch, schedule, optimizer and recomputation."""
    recompute: Arguments = {}
    if config.recompute_granularity == "full":
        layers = config.recompute_num_layers
        recompute = {
            "recompute-method": "uniform" if layers is None else "block",
            "recompute-num-layers": 1 if layers is None else layers,
        }
    elif config.recompute_granularity == "selective":
        recompute = {"recompute-modules": config.recompute_modules}
    return {
        **_same(config, "lr", "min_lr"),
        "lr-decay-style": "WSD" if config.lr_decay_style == "wsd" else config.lr_decay_style,
        "lr-wsd-decay-style": config.lr_wsd_decay_style if config.wsd_decay_steps else None,
        "bf16": config.precision == "bf16",
        **_same(config, "deterministic_mode", "seed"),
        "optimizer": config.optimizer,
        "muon-momentum": config.muon_momentum if config.optimizer == "muon" else None,
        **_same(config, "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad"),
        **_same(config, "use_distributed_optimizer"),
        **_same(config, "overlap_grad_reduce", "overlap_param_gather"),
        "optimizer-cpu-offload": config.optimizer_cpu_offload,
        "recompute-granularity": config.recompute_granularity,
        **recompute,
    }


def _batches(config: MegatronLmConfig, *, ramps_up: bool) -> Arguments:
    """Set batches, budget and schedule: in steps, or in samples where the batch grows.

    arguments.py, validate_args: a ramp-up is for `--train-samples`. A step-wise schedule, whose
    thresholds are tokens and strictly grow, excludes `--global-batch-size`.
    """
    grows = config.rampup_batch_size is not None
    unit, count = ("samples" if grows else "iters"), config.schedule_count
    sizes: Arguments = {"rampup-batch-size": config.rampup_batch_size}
    if grows and not ramps_up:
        stages = config.batch_sizes.stages
        steps = [f"{one.first_sample * config.seq_length}:{one.samples}" for one in stages]
        sizes = {
            "global-batch-size": None,
            "step-batch-size-schedule": " ".join(steps),
            "eval-global-batch-size": config.global_batch_size,
        }
    return {
        **_same(config, "micro_batch_size", "global_batch_size"),
        **sizes,
        f"train-{unit}": count(config.train_steps),
        f"lr-wsd-decay-{unit}": config.wsd_decay_count,
        f"lr-warmup-{unit}": count(config.lr_warmup_steps),
        f"lr-decay-{unit}": count(config.lr_decay_steps),
    }


def _data(config: MegatronLmConfig, places: Places) -> Arguments:
    """Name the data and its sizes; the sizes stand in for a tokenizer, which is not needed."""
    blend = tuple(part for weighted in config.data_blend for part in weighted)
    paths = blend if len(config.data_blend) > 1 else blend[1:]
    return {
        "data-path": paths or None,
        "mock-data": not paths,
        "split": config.data_split if paths else None,
        "data-cache-path": places.data_cache,
        "tokenizer-type": "NullTokenizer",
        **_same(config, "vocab_size", "padded_vocab_size"),
        "eval-interval": config.eval_interval_steps or config.train_steps,
        "eval-iters": config.eval_batches if config.eval_interval_steps else 0,
    }


def _checkpoints(config: MegatronLmConfig, places: Places) -> Arguments:
    """Configure saving, resuming and ending; a fresh start loads nothing by accident."""
    return {
        "save": places.save,
        "save-interval": config.save_interval_steps,
        "ckpt-format": "torch_dist",
        "ckpt-fully-parallel-load": True,
        "dist-ckpt-optim-fully-reshardable": config.optimizer_sharding == "fully_reshardable",
        "async-save": config.async_save,
        # arguments.py: without it the main line switches --async-save off
        "use-persistent-ckpt-worker": config.async_save,
        "load": places.load,
        "ckpt-step": places.load_step,
        "exit-on-missing-checkpoint": places.load is not None,
        "exit-signal-handler": True,
        "exit-signal-handler-for-dataloader": True,
        "distributed-timeout-minutes": max(1, math.ceil(config.distributed_timeout_seconds / 60)),
    }
