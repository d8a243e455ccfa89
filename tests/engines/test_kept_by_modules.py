"""What a step of Hugging Face's classes holds in memory, counted, against what a plan says.

The forward and backward passes run on tensors without memory (FakeTensorMode), and every storage
that an operation makes is followed until it is freed. Only attention is a stand-in, with the
tensors that a fused kernel keeps: on a CPU torch takes another one. torch.autocast of CPUs takes
the place of that of GPUs; both leave sums in fp32 and copy the inputs of products.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from variants import varied

from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.train_json import train_config
from hpctrain.job.plan import load, plan_option
from hpctrain.plan.documents import Plan
from hpctrain.train.engines.megatron.verify import LiveStorages
from hpctrain.train.engines.models.build import build_module
from hpctrain.train.engines.models.tasks import Loss, loss_of, masked_sum
from hpctrain.train.engines.models.transformers_library import hide_optional_packages

GPT = dict(family="gpt", layers=3, hidden=512, heads=8, vocab=5000, seq=512)
LLAMA = dict(
    family="llama", layers=3, hidden=512, ffn=1408, heads=8, kv_heads=2, vocab=5000, seq=512
)
BERT = dict(family="bert", layers=3, hidden=512, heads=8, vocab=5000, seq=512, dropout=0.0)
VIT = dict(family="vit", layers=8, hidden=512, heads=8, vocab=100, image=224, patch=16)
RESNET = dict(family="resnet", layers=50, vocab=100, image=224)
BF16, FP32 = dict(precision="bf16"), dict(precision="fp32")


def of(model: dict[str, Any], engine: str, **others: Any) -> dict[str, Any]:
    return dict(model=model, engine={"name": engine}, **others)


# (document, how much more than counted a plan may say); never more than 3 % less
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "gpt, bf16": (of(GPT, "fsdp", **BF16), 0.02),
    "gpt, autocast": (of(GPT, "ddp", **BF16), 0.02),
    "llama, bf16": (of(LLAMA, "deepspeed", **BF16), 0.02),
    "llama, fp32": (of(LLAMA, "ddp", **FP32), 0.02),
    "llama, autocast": (of(LLAMA, "ddp", **BF16), 0.02),
    "bert, autocast": (of(BERT, "ddp", **BF16), 0.02),
    "vit, bf16": (of(VIT, "fsdp", **BF16), 0.02),
    "resnet, autocast": (of(RESNET, "ddp", **BF16), 0.02),
    "gpt, recomputed": (of(GPT, "fsdp", recompute="full", **BF16), 0.1),
}


def planned(
    directory: Path, document: dict[str, Any], profile: str = "a100x1"
) -> tuple[Plan, ModuleConfig]:
    whole = dict(
        name="kept",
        batch={"global": 32, "micro": 32},
        budget={"steps": 1},
        optimizer={"lr": 1e-3},
        checkpoint={"every_steps": 1},
        resources={"gpus": 1},
        recompute="none",
    )
    path = directory / "spec.yaml"
    path.write_text(json.dumps({**whole, **document}))
    option = plan_option(load(path, profile), "time")
    assert option.decision is not None, option.refusal
    config = train_config(option.decision.job)
    assert isinstance(config, ModuleConfig)
    return option.decision.plan, config


class Peak(LiveStorages):
    """The most bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self.track(tensor.untyped_storage())
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return output


class Fused(torch.autograd.Function):
    """What a fused attention kernel keeps: its inputs, its output, a number for each row."""

    @staticmethod
    def forward(context: Any, query: Any, key: Any, value: Any) -> Any:
        output = torch.empty_like(query)
        rows = torch.empty(query.shape[:-1], dtype=torch.float32)
        context.save_for_backward(query, key, value, output, rows)
        return output

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return tuple(torch.empty_like(one) for one in context.saved_tensors[:3])


def fused(query: Any, key: Any, value: Any, **_: Any) -> Any:
    """Below autocast inputs of a kernel are in its precision."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (one.bfloat16() for one in (query, key, value))
    return Fused.apply(query, key, value)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    with hide_optional_packages():
        masking = importlib.import_module("transformers.masking_utils")
    # it looks at numbers, which there are none of
    monkeypatch.setattr(masking, "find_packed_sequence_indices", lambda positions: None)


@contextmanager
def weightless(config: ModuleConfig, plan: Plan) -> Iterator[Any]:
    """The module in the precision that its engine computes in."""
    module = build_module(config, device=torch.device("meta"), initialize=False)
    if plan.precision == "bf16" and plan.engine != "ddp":
        module = module.bfloat16()
    if config.activation_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield module.to_empty(device="cpu").train()


def batch_of(config: ModuleConfig) -> SimpleNamespace:
    size, words = config.micro_batch_size, (config.micro_batch_size, config.seq_length)
    if config.model.reads_images:
        side = config.model.image
        return SimpleNamespace(
            pixels=torch.empty(size, 3, side, side, dtype=torch.bfloat16),
            labels=torch.empty(size, dtype=torch.long),
        )
    tokens = torch.empty(words, dtype=torch.long)
    return SimpleNamespace(tokens=tokens, labels=tokens, loss_mask=torch.empty(words))


def loss_function(config: ModuleConfig) -> Loss:
    """Which words are masked is drawn outside of what is counted."""
    if config.model.family != "bert":
        return loss_of(config)
    return lambda module, batch: masked_sum(
        module(input_ids=batch.tokens).logits, batch.tokens, batch.loss_mask
    )


def counted_bytes(config: ModuleConfig, plan: Plan) -> int:
    """Peak of the second step, so that what stays for good is not counted; without weights that
    autocast has copied, which a plan counts with the weights."""
    autocast = plan.engine == "ddp" and plan.precision == "bf16"
    with weightless(config, plan) as module, Peak() as storages:
        batch, loss = batch_of(config), loss_function(config)
        for _ in range(2):
            module.zero_grad()
            gc.collect()
            before = storages.peak_bytes = storages.live_bytes
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                total, _count, *_ = loss(module, batch)
            total.backward()
            del total
        copies = 2 * sum(p.numel() for p in module.parameters() if p.dim() > 1) if autocast else 0
        return storages.peak_bytes - before - copies


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", varied(CASES, "llama, autocast"))
def test_a_plan_says_what_a_step_holds(name: str, tmp_path: Path) -> None:
    document, more = CASES[name]
    plan, config = planned(tmp_path, document)
    said = plan.memory[0].activations_bytes + plan.memory[0].logits_bytes
    counted = counted_bytes(config, plan)
    apart = said / counted - 1
    print(f"{name}: planned {said / 2**20:.0f} MiB, counted {counted / 2**20:.0f}: {apart:+.1%}")
    assert -0.03 <= apart <= more
