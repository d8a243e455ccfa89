"""Runs of megatron-core on the stub of TransformerEngine; called in a process that has it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from trial_runs import LIMIT_SECONDS, Trial

from bench.free_ports import free_port
from hpctrain.engines.train_json import parse_train_config
from hpctrain.records.layout import RunLayout


def train(directory: str, resume: int | None = None) -> list[Any]:
    """Run one launch to its end; returns exit codes by rank, and the log of rank 0."""
    run = RunLayout(Path(directory))
    trial = Trial(run, parse_train_config(run.train_config.read_text()))
    ranks = trial.start(resume=resume)
    codes = ranks.wait(LIMIT_SECONDS)
    logs = "\n".join(ranks.log(rank)[-3000:] for rank, code in enumerate(codes) if code)
    return [codes, logs]


def layers_of(directory: str) -> dict[str, list[str]]:
    """Build the model of one process; returns classes of its modules and names of its state."""
    run = RunLayout(Path(directory))
    config: Any = parse_train_config(run.train_config.read_text())
    answer: dict[str, list[str]] = {}

    from hpctrain.train.engines.megatron import fixes
    from hpctrain.train.engines.megatron.mesh import open_mesh
    from hpctrain.train.engines.megatron.model import build_model
    from hpctrain.train.rank_environment import Launch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    os.environ.update(RANK="0", WORLD_SIZE="1")
    fixes.install()
    mesh = open_mesh(config, Launch(0, 1, 0, "here", 0, ""))
    (model,) = build_model(config, mesh, initialize=True).bare
    answer["classes"] = sorted({type(module).__name__ for module in model.modules()})
    state = model.state_dict()
    answer["extra"] = [name for name in state if name.endswith("_extra_state")]
    answer["parallel"] = sorted(
        name
        for name, weight in model.named_parameters()
        if getattr(weight, "tensor_model_parallel", False)
    )
    return answer


def optimizer_class() -> str:
    """Return the module of the optimizer that megatron-core has chosen while it was imported."""
    from megatron.core.optimizer import Adam

    return str(Adam.__module__)


def probe_product(sizes: list[int]) -> list[list[float]]:
    """Return the gradients of a layer of the stub and of torch, for a comparison."""
    import transformer_engine.pytorch as engine

    rows, inside, outside = sizes
    torch.manual_seed(1)
    layer = engine.LayerNormLinear(
        inside, outside, normalization="RMSNorm", params_dtype=torch.float32, device="cpu"
    )
    inp = torch.randn(rows, 1, inside, requires_grad=True)
    layer(inp).pow(2).sum().backward()
    own = [inp.grad, layer.weight.grad, layer.layer_norm_weight.grad, layer.bias.grad]
    again = inp.detach().clone().requires_grad_()
    weight, gain = layer.weight.detach().clone(), layer.layer_norm_weight.detach().clone()
    bias = layer.bias.detach().clone()
    leaves = [again, weight.requires_grad_(), gain.requires_grad_(), bias.requires_grad_()]
    norm = again / (again.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain
    torch.nn.functional.linear(norm, weight, bias).pow(2).sum().backward()
    return [
        [float((mine - leaf.grad).abs().max()), float(leaf.grad.abs().max())]
        for mine, leaf in zip(own, leaves, strict=True)
    ]


def convert(source: str, target: str) -> None:
    """Convert a checkpoint in a process that has the engine."""
    from hpctrain.convert.__main__ import convert as convert_here

    convert_here(Path(source), Path(target))


def apart(function: Callable[..., Any], *given: Any) -> None:
    """Call it in a fork: process groups must not live where ranks are forked from."""
    process = multiprocessing.get_context("fork").Process(target=function, args=given)
    process.start()
    process.join(LIMIT_SECONDS)
    assert process.exitcode == 0


def recipe_of(directory: str) -> list[Any]:
    """Return the recipe of TransformerEngine that megatron-core makes from a run's settings."""
    config: Any = parse_train_config(RunLayout(Path(directory)).train_config.read_text())
    from megatron.core.fp4_utils import get_fp4_recipe
    from megatron.core.fp8_utils import get_fp8_recipe

    from hpctrain.train.engines.megatron.model import transformer_settings

    settings = transformer_settings(config)
    recipe = get_fp4_recipe(settings) if settings.fp4 else get_fp8_recipe(settings)
    names = ("amax_history_len", "amax_compute_algo")
    return [
        type(recipe).__name__.removeprefix("TE"),
        *(getattr(recipe, name) for name in names if hasattr(recipe, name)),
    ]
