"""Compare hpctrain's settings for six published models with Megatron-Bridge's recipes.

`recipes/NAME.yaml` has the recipe's values as facts, hpctrain's spec of the same model, layout and
options, and a reason for each difference; `recipes/shared.yaml` what several recipes share. Both
sides become megatron-core's own configuration objects, so that all of their fields are compared,
also those that neither sets. Belongs here: reading, building, comparing. Does not belong here: what
a GPU would see (patched by the test).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from ruamel.yaml import YAML

from hpctrain.base.units import ByteSize
from hpctrain.engines.megatron import MegatronConfig, position_kind
from hpctrain.engines.train_json import train_config
from hpctrain.job.prepare import load_inputs, load_knowledge
from hpctrain.plan.abilities.trainable import untrainable_fields
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.planner import make_plan
from hpctrain.spec.loader import load_catalogue
from hpctrain.train.engines.megatron import engine, model
from hpctrain.train.engines.megatron.preflight import option_problems

HERE = Path(__file__).resolve().parent / "recipes"
ROOT = HERE.parents[2]
NAMES = sorted(path.stem for path in HERE.glob("*.yaml") if path.stem != "shared")
GROUPS = ("transformer", "ddp", "optimizer", "model", "environment")
# Functions, and what the process groups or megatron-core make of other fields.
_NOT_COMPARED = ("init_method", "timers")
_VALUES = {
    "bfloat16": torch.bfloat16,
    "silu": functional.silu,
    "gelu": functional.gelu,
}
_TYPED = ("params_dtype", "pipeline_dtype", "autocast_dtype", "activation_func")

Settings = dict[str, dict[str, Any]]


def read(name: str) -> dict[str, Any]:
    """Read one hand-written file."""
    document = YAML(typ="safe").load((HERE / f"{name}.yaml").read_text())
    assert isinstance(document, dict)
    return document


def write_inputs(recipe: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write hpctrain's spec of a recipe, and a cluster of H100 with enough nodes."""
    given = recipe["spec"]
    spec = dict(
        name="recipe",
        model=given["model"],
        batch=given["batch"],
        budget=dict(steps=100000),
        precision="bf16",
        optimizer=dict(weight_decay=0.033, **given["optimizer"]),
        schedule=dict(warmup_steps=2000),
        parallel=given["parallel"],
        recompute="none",
        checkpoint=dict(every_steps=500),
        engine=dict(megatron=given["megatron"]),
        resources=dict(gpus=given["gpus"]),
        environment=dict(variables=given.get("environment", {})),
    )
    spec_path, profile_path = directory / "spec.yaml", directory / "h100.yaml"
    spec_path.write_text(json.dumps(spec))
    profile = YAML(typ="safe").load((ROOT / "cluster_profiles/h100x16.yaml").read_text())
    profile["name"] = "h100"
    profile["nodes"] |= dict(count=1024, memory="30000GiB")
    profile_path.write_text(json.dumps(profile))
    return spec_path, profile_path


def ours(recipe: dict[str, Any], directory: Path) -> Settings:
    """Return what hpctrain's trainer would give to megatron-core, and the job's environment."""
    spec_path, profile_path = write_inputs(recipe, directory)
    loaded, site = load_inputs(spec_path, str(profile_path))
    knowledge = load_knowledge(site)
    # Whether a layout fits is the planner's question, not that of the settings.
    gpu = site.document.gpu.model_copy(update=dict(memory=ByteSize(10**13)))
    spec = loaded.document
    plan = make_plan(spec, site.document.model_copy(update=dict(gpu=gpu)), knowledge)
    assert untrainable_fields(spec) == [] and knowledge.gpu is not None
    config = train_config(TrainingJob(spec, site.document, plan))
    assert isinstance(config, MegatronConfig)
    assert list(option_problems(config)) == []
    model_parallel = plan.layout.tp * plan.layout.cp > 1
    variables = load_catalogue([]).variables_for(
        knowledge.gpu, plan.engine, model_parallel=model_parallel
    )
    record = config.model
    rotary = record.positions == "rope"
    return dict(
        transformer=_fields(model.transformer_settings(config)),
        ddp=_fields(model.ddp_settings(config)),
        optimizer=_fields(engine.optimizer_settings(config)),
        model=dict(
            position_embedding_type=position_kind(record),
            rotary_base=record.rope_base if rotary else None,
            rotary_percent=record.rotates.partial,
            rope_scaling=record.rotates.scaling is not None,
            share_embeddings_and_output_weights=record.tied,
            layer_spec="parts",  # get_gpt_layer_with_transformer_engine_spec
        ),
        # of the GPU's generation and of the spec; a site's own are its own
        environment={wanted.name: wanted.value for wanted in variables}
        | spec.environment.variables,
    )


def theirs(recipe: dict[str, Any], shared: dict[str, Any]) -> Settings:
    """Return the recipe's own settings: its layers, each over the earlier ones."""
    layers = [shared["layers"][name] for name in recipe["layers"]] + [recipe["theirs"]]
    given: Settings = {
        group: {name: value for layer in layers for name, value in layer.get(group, {}).items()}
        for group in GROUPS
    }
    transformer = {
        name: _VALUES.get(value, value) if name in _TYPED else value
        for name, value in given["transformer"].items()
    }
    layout = transformer.get("pipeline_model_parallel_layout")
    if isinstance(layout, str):
        transformer["pipeline_model_parallel_layout"] = _deepseek_layout()
    latent = transformer.get("multi_latent_attention", False)
    kind = MLATransformerConfig if latent else TransformerConfig
    optimizer_values = dict(given["optimizer"])
    inner = {
        name: optimizer_values.pop(name)
        for name in (
            "use_precision_aware_optimizer",
            "main_grads_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
        )
        if name in optimizer_values
    }
    optimizer_values["params_dtype"] = torch.bfloat16
    optimizer_fields = _fields(OptimizerConfig(**optimizer_values))
    # The precision-aware optimizer would import TransformerEngine's Adam, which is not here.
    optimizer_fields |= inner
    return dict(
        transformer=_fields(kind(**transformer)),
        ddp=_fields(DistributedDataParallelConfig(**given["ddp"])),
        optimizer=optimizer_fields,
        model=given["model"],
        environment=given["environment"],
    )


def _deepseek_layout() -> list[list[str]]:
    """Return recipes/deepseek/h100/deepseek_v3.py's layout of 16 stages without virtual ones."""
    stages = [["decoder"] * 4 for _ in range(15)] + [["decoder", "mtp", "loss"]]
    return [["embedding", *stages[0]], *stages[1:]]


def _fields(configuration: Any) -> dict[str, Any]:
    """Return all fields of a configuration as JSON has them."""
    return {
        field.name: _plain(getattr(configuration, field.name))
        for field in dataclasses.fields(configuration)
        if not field.name.endswith(_NOT_COMPARED) and not field.name.startswith("_")
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    layout = getattr(value, "layout", None)  # PipelineParallelLayerLayout
    return _plain(layout) if layout is not None else str(getattr(value, "name", value))


def differences(left: Settings, right: Settings) -> dict[str, dict[str, Any]]:
    """Return every field that is not equal, by `group.field`."""
    found = {}
    for group in GROUPS:
        for name in sorted({*left[group], *right[group]}):
            pair = left[group].get(name), right[group].get(name)
            if pair[0] != pair[1]:
                found[f"{group}.{name}"] = dict(hpctrain=pair[0], recipe=pair[1])
    return found


def set_values(settings: Settings, defaults: Settings) -> Settings:
    """Leave out fields that have megatron-core's defaults."""
    return {
        group: {
            name: value
            for name, value in values.items()
            if name not in defaults[group] or defaults[group][name] != value
        }
        for group, values in settings.items()
    }


def library_defaults() -> Settings:
    """Return megatron-core's defaults, before anything is derived from them."""
    return dict(
        transformer=_defaults(MLATransformerConfig) | _defaults(TransformerConfig),
        ddp=_defaults(DistributedDataParallelConfig),
        optimizer=_defaults(OptimizerConfig),
        model={},
        environment={},
    )


def _defaults(kind: Any) -> dict[str, Any]:
    return {
        field.name: _plain(field.default)
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }
