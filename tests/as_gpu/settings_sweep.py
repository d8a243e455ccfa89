"""Every setting of every model family as a rank with a GPU would build it.

Families are fields of a tiny model; settings are the fields of `MegatronConfig` with their values,
read off the types, so that a new field is swept without a line here. Replaced is what asks for a
GPU: `on_cpu` is False wherever hpctrain reads it, and tensors lie on the CPU all the same. Process
groups are fake. Belongs here: cases, and building one. Does not belong here: training.
"""

from __future__ import annotations

import json
import os
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pydantic import ValidationError
from trial_runs import GPT, LLAMA

from hpctrain.base.errors import InvalidInputError
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.train_json import parse_train_config
from hpctrain.engines.training import TrainConfig
from hpctrain.plan.abilities.trainable_megatron import missing_parts
from hpctrain.records.layout import RunLayout
from hpctrain.spec.architecture import AttentionSpec, MlaSpec, MoeSpec, RopeSpec
from hpctrain.spec.document import Document
from hpctrain.spec.families import value_at
from hpctrain.spec.model import ModelSpec

EXPERTS: dict[str, Any] = dict(experts=4, top_k=2, ffn=48, shared_ffn=32, dense_layers=1)
LATENT: dict[str, Any] = dict(q_rank=24, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
COMMON: dict[str, Any] = dict(
    engine="megatron", transformer_impl="transformer_engine", precision="bf16", ddp_bucket_size=None
)


def of_parts(plain: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """A tiny run with these parts of a model."""
    document = MegatronConfig(**{**plain, **COMMON}).model_dump(mode="json")
    document["model"] |= parts
    return document


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": of_parts(GPT),
    "llama": of_parts(LLAMA),
    "bert": of_parts({**GPT, "model_type": "bert"}),
    "experts": of_parts(LLAMA, moe=EXPERTS),
    "latent attention": of_parts(LLAMA, mla=LATENT, kv_heads=None, head_dim=None),
    "prediction layer": of_parts(LLAMA, mtp_layers=1),
    "experts, latent attention, prediction layer": of_parts(
        LLAMA, moe=EXPERTS, mla=LATENT, mtp_layers=1, kv_heads=None, head_dim=None
    ),
}
# Numbers to try. None: sizes that the families set, and what no layer is built from.
NUMBERS: dict[str, tuple[Any, ...] | None] = {
    "tensor_model_parallel_size": (2,),
    "pipeline_model_parallel_size": (2,),
    "virtual_pipeline_model_parallel_size": (2,),
    "context_parallel_size": (2,),
    "expert_model_parallel_size": (2,),
    "expert_tensor_parallel_size": (1, 2),
    "recompute_num_layers": (1,),
    "recompute_modules": (
        *(("core_attn",), ("mlp",), ("moe",), ("layernorm",), ("moe_act",), ("mla_up_proj",)),
        ("core_attn", "layernorm"),
    ),
    "cpu_offloading_num_layers": (1,),
    "num_distributed_optimizer_instances": (2, 3),
    "exp_avg_dtype": ("bf16",),
    "exp_avg_sq_dtype": ("fp8",),
    "attention_backend": ("unfused", "local"),
    "hierarchical_context_parallel_sizes": ((2, 2),),
    "ddp_bucket_size": (20_000,),
    **dict.fromkeys(("model", "padded_vocab_size", "pipeline_layer_split")),
}
# Of the model its choices are tried, and these numbers.
MODEL_NUMBERS: dict[str, tuple[Any, ...]] = {
    "model.dropout": (0.1,),
    "model.norm_epsilon": (1e-6,),
    **dict.fromkeys(("model.residual_scale", "model.embedding_scale", "model.logit_scale"), (2.0,)),
    "model.logit_soft_cap": (30.0,),
    "model.attention.window": (8,),
    "model.attention.soft_cap": (30.0,),
    "model.attention.scale": (0.1,),
    "model.rope.partial": (0.5,),
    "model.rope.without": ([False, True],),
    "model.rope.scaling": (dict(kind="linear", factor=2.0), dict(kind="yarn", factor=2.0)),
    **dict.fromkeys(("model.moe.top_k", "model.moe.dense_layers"), (1,)),
    "model.moe.every": (2,),
    "model.moe.scale": (2.0,),
    "model.moe.balance_loss": (0.0,),
    "model.moe.z_loss": (0.001,),
}
# Not settings of a layer: another program, another kind of model, another order of ranks.
_ELSEWHERE = {"engine", "model.family"}
# What a value needs beside it. A pair of field and value, or a field for all its values.
BESIDE: dict[Any, dict[str, Any]] = {
    "tensor_model_parallel_size": dict(sequence_parallel=True),
    "sequence_parallel": dict(tensor_model_parallel_size=2),
    "pipeline_model_parallel_size": dict(pipeline_layer_split=[[2], [2]]),
    "virtual_pipeline_model_parallel_size": dict(
        pipeline_model_parallel_size=2, pipeline_layer_split=[[1, 1], [1, 1]]
    ),
    "expert_model_parallel_size": dict(data_parallel_size=2),
    "expert_tensor_parallel_size": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "overlap_grad_reduce": dict(data_parallel_size=2),
    "overlap_param_gather": dict(data_parallel_size=2, overlap_grad_reduce=True),
    "ddp_bucket_size": dict(data_parallel_size=2, overlap_grad_reduce=True),
    "num_distributed_optimizer_instances": dict(data_parallel_size=4),
    "hierarchical_context_parallel_sizes": dict(context_parallel_size=4),
    "exp_avg_dtype": dict(use_precision_aware_optimizer=True),
    "exp_avg_sq_dtype": dict(use_precision_aware_optimizer=True),
    "main_params_dtype": dict(use_precision_aware_optimizer=True),
    "recompute_num_layers": dict(recompute_granularity="full"),
    "recompute_modules": dict(recompute_granularity="selective"),
    "fp8_recipe": dict(fp8="hybrid"),
    "fp8_param": dict(fp8="hybrid"),
    "tp_comm_overlap": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "defer_embedding_wgrad_compute": dict(
        pipeline_model_parallel_size=2,
        pipeline_layer_split=[[2], [2]],
        **{"model.tied": False},
    ),
    "moe_token_dispatcher_type": dict(expert_model_parallel_size=2, data_parallel_size=2),
    "moe_flex_dispatcher_backend": dict(
        moe_token_dispatcher_type="flex", expert_model_parallel_size=2, data_parallel_size=2
    ),
}


@dataclass(frozen=True)
class Case:
    """One value of one setting of a family."""

    family: str
    field: str
    value: Any

    @property
    def changes(self) -> dict[str, Any]:
        return {**BESIDE.get(self.field, {}), self.field: self.value}

    @property
    def config(self) -> MegatronConfig:
        """The document; raises ValidationError if the model of documents refuses it."""
        document = json.loads(json.dumps(FAMILIES[self.family]))
        for path, value in self.changes.items():
            *above, last = path.split(".")
            place = document
            for name in above:
                place[name] = place.get(name) or {}
                place = place[name]
            place[last] = value
        config = parse_train_config(json.dumps(document))
        assert isinstance(config, MegatronConfig)
        return config


def swept_fields(family: str = "gpt") -> list[str]:
    """Return the settings of megatron-core, two that all engines have, and parts of the model."""
    own = [name for name in MegatronConfig.model_fields if name not in TrainConfig.model_fields]
    fields = [*own, "precision", "deterministic_mode", *_model_fields(family)]
    return [name for name in fields if name not in _ELSEWHERE]


def _model_fields(family: str) -> Iterator[str]:
    """Find the fields of the parts that a family has, or that every model may have."""
    yield from (f"model.{name}" for name in ModelSpec.model_fields)
    parts = {"attention": AttentionSpec, "rope": RopeSpec, "moe": MoeSpec, "mla": MlaSpec}
    for name, part in parts.items():
        if FAMILIES[family]["model"].get(name) or name in ("attention", "rope"):
            yield from (f"model.{name}.{field}" for field in part.model_fields)


def _annotation(field: str) -> Any:
    document: Any = MegatronConfig
    *above, last = field.split(".")
    for name in above:
        found = document.model_fields[name].annotation
        kinds = [one for one in (found, *typing.get_args(found)) if isinstance(one, type)]
        document = next(one for one in kinds if issubclass(one, Document))
    return document.model_fields[last].annotation


def values_of(field: str) -> tuple[Any, ...]:
    """Return the values to try; raises KeyError for a number that nobody has chosen values for."""
    if field in NUMBERS:
        return NUMBERS[field] or ()
    if field in MODEL_NUMBERS:
        return MODEL_NUMBERS[field]
    found = list(_enumerated(_annotation(field)))
    if field.startswith("model."):
        return tuple(value for value in found if value is not None)
    if not found:
        raise KeyError(f"add values of {field} to NUMBERS")
    return tuple(found)


def _enumerated(annotation: Any) -> Iterator[Any]:
    """Find the values of Literal and bool, also within a union or an alias."""
    annotation = getattr(annotation, "__value__", annotation)  # an alias of `type`
    origin = typing.get_origin(annotation)
    if annotation is bool:
        yield from (False, True)
    elif annotation is type(None):
        yield None
    elif origin is typing.Literal:
        yield from typing.get_args(annotation)
    elif origin in (typing.Union, types.UnionType, typing.Annotated):
        arguments = typing.get_args(annotation)
        for argument in arguments[:1] if origin is typing.Annotated else arguments:
            yield from _enumerated(argument)


def cases_of(family: str) -> list[Case]:
    """Return the family itself, and each value that differs from it."""
    base = Case(family, "precision", "bf16").config.model_dump(mode="json")
    changed = [
        Case(family, field, value)
        for field in swept_fields(family)
        for value in values_of(field)
        if value_at(base, field) != value
    ]
    return [Case(family, "precision", "bf16"), *changed]


@contextmanager
def as_a_gpu_sees_it() -> Iterator[None]:
    """Let hpctrain take this process for one with a GPU; its tensors stay on the CPU."""
    from hpctrain.train import device

    seen = [m for name, m in list(sys.modules.items()) if name.startswith("hpctrain.train")]
    patches = [
        mock.patch.object(module, "on_cpu", return_value=False)
        for module in seen
        if hasattr(module, "on_cpu")
    ]
    patches.append(mock.patch.object(device, "choose_device", return_value=torch.device("cpu")))
    # what megatron-core's own graphs ask of CUDA while layers are built (cuda_graphs.py)
    for name, answer in {"get_device_capability": (9, 0), "graph_pool_handle": (0, 1)}.items():
        patches.append(mock.patch.object(torch.cuda, name, return_value=answer))
    patches += [mock.patch.object(torch.cuda, name) for name in ("Stream", "set_stream")]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def configured(config: MegatronConfig) -> Iterator[None]:
    """Set variables and determinism as a rank does at its start, for the duration of the block."""
    from hpctrain.train import startup

    with mock.patch.dict(os.environ):
        startup._configure_libraries(config, leads=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def build(config: MegatronConfig) -> str:
    """Build what a rank trains with; returns "built", or the words of hpctrain's refusal."""
    from fake_worlds import coordinate

    from hpctrain.train import software
    from hpctrain.train.engines.megatron.engine import build_optimizer
    from hpctrain.train.engines.megatron.model import build_model
    from hpctrain.train.engines.megatron.preflight import engine_problems

    if missing := [*missing_parts(config.model)]:  # refused before the queue
        return "; ".join(f"model.{field}: {why}" for field, why in missing)
    if problems := list(engine_problems(config, RunLayout(Path("/nowhere")))):
        return "; ".join(f"{problem.message} ({problem.hint})" for problem in problems)
    imported = {
        "transformer_engine": software.transformer_engine().imported,
        "apex_wgrad": software.apex_wgrad().imported,
    }
    for need in getattr(config, "software_needs", ()):
        if need.library is not None and not imported.get(need.library, False):
            return f"{need.setting} needs {need.library}"  # refused by software_agreement
    try:
        here = coordinate(config, config.world_size - 1)
        with as_a_gpu_sees_it(), configured(config), here as mesh:
            model = build_model(config, mesh, initialize=True)
            build_optimizer(config, model)
    except InvalidInputError as error:
        return str(error)
    return "built"


def sweep(family: str) -> list[list[str]]:
    """Build every case; returns for each its field, value and outcome.

    An exception of megatron-core is an outcome of the form `ValueError: ...`: what a user would
    meet on the cluster.
    """
    outcomes = []
    for case in cases_of(family):
        try:
            config = case.config
        except ValidationError as error:  # refused as a spec
            outcomes.append([case.field, json.dumps(case.value), f"{case.field} is no: {error}"])
            continue
        try:
            outcome = build(config)
        except Exception as error:
            text = str(error).splitlines()
            outcome = f"{type(error).__name__}: {text[0] if text else ''}"
        outcomes.append([case.field, json.dumps(case.value), outcome])
    return outcomes


def settings_of(family: str) -> dict[str, Any]:
    """Return the fused kernels of a family on a GPU."""
    from fake_worlds import coordinate

    from hpctrain.train.engines.megatron.model import transformer_settings

    config = Case(family, "precision", "bf16").config
    with as_a_gpu_sees_it(), coordinate(config, 0):
        made = transformer_settings(config)
    names = ("gradient_accumulation_fusion", "apply_rope_fusion", "bias_activation_fusion")
    return {name: getattr(made, name) for name in names}
