"""Every engine of Hugging Face's classes, on several processes, against a loop of plain PyTorch.

The loop is written out below: neither the trainer nor any engine is in it. It has the same first
weights (by the distributions of transformers, from the seed) and the same samples. Whatever else an
engine can do is compared with one process in its own tests.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from trial_runs import PLAIN, PLAIN_LLAMA, ZERO, MakeTrial, apart, make_trial, once

from hpctrain.train.data import open_data
from hpctrain.train.datasets.sample_order import Share
from hpctrain.train.engines.models.transformers_library import class_named
from hpctrain.train.initial_weights import Normal, fill, stream_key

# A loss near 5.5 is a multiple of 2^-21 = 4.8e-7 in fp32. Other ranks add up in another order,
# which moves it by one or two of these at each step, and AdamW hands that on to the next steps: ten
# after six steps are rounding, and a wrong gradient is off by thousands. Norms by share: a sum of
# 100,000 squares. Seen: 7.2e-7, and 1.2e-6 of a norm; on a processor whose matrix products add up
# in another order 1.4e-6, and 1.14e-5 of a norm after six steps.
LOSS_TOLERANCE = 10 * 2.0**-21
NORM_TOLERANCE = 3e-5
STEPS, BATCH, SEQUENCE, RATE = 6, 8, 32, 3e-3
SAME: dict[str, Any] = dict(
    train_steps=STEPS, lr=RATE, lr_warmup_steps=0, lr_decay_style="constant", seed=4321
)
TWO: dict[str, Any] = dict(PLAIN, data_parallel_size=2)
FSDP: dict[str, Any] = dict(TWO, engine="fsdp", shard_size=2)
TENSORS: dict[str, Any] = dict(ZERO, model=PLAIN_LLAMA["model"], tensor_parallel=2)
TABLE: dict[str, dict[str, Any]] = {
    "ddp": TWO,
    "fsdp": FSDP,
    "fsdp, gradients and optimizer only": dict(FSDP, reshard_after_forward=False),
    "deepspeed, ZeRO 1": dict(ZERO, zero_stage=1),
    "deepspeed, ZeRO 2": dict(ZERO, zero_stage=2),
    "deepspeed, ZeRO 3": dict(ZERO, zero_stage=3),
    "deepspeed, two stages": dict(ZERO, pipeline_stages=(1, 1), data_parallel_size=1),
    "deepspeed, tp 2, ZeRO 0": dict(TENSORS, zero_stage=0, data_parallel_size=1),
    "deepspeed, tp 2 x dp 2, ZeRO 2": dict(TENSORS, zero_stage=2),
    "deepspeed, tp 2 x pp 2 x dp 2": dict(
        TENSORS, pipeline_stages=(1, 1), parallel_order="tp-cp-ep-pp-dp"
    ),
}
Told = list[tuple[float, float]]


def the_gpt() -> Any:
    """PLAIN's shape by transformers' own names."""
    settings = class_named("GPT2Config")(
        vocab_size=250,
        n_positions=SEQUENCE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_inner=128,
        activation_function="gelu",
        layer_norm_epsilon=1e-5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    # GPT-2's own rule: outputs of the two residual branches of a block add up
    return begun(class_named("GPT2LMHeadModel")(settings), c_proj=0.02 / math.sqrt(2 * 2))


def the_llama() -> Any:
    """PLAIN_LLAMA's shape: two queries for each key, and an output layer of its own."""
    settings = class_named("LlamaConfig")(
        vocab_size=250,
        max_position_embeddings=SEQUENCE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return begun(class_named("LlamaForCausalLM")(settings))


def begun(model: Any, **deviations: float) -> Any:
    """Matrices by the names of their layers; norms and biases are ones and zeros already."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            drawn = Normal(0.0, deviations.get(name.split(".")[-2], 0.02))
            key = stream_key(SAME["seed"], name)
            fill(weight, key, drawn, global_shape=weight.shape, offsets=(0, 0))
    return model


def plain_loop(model: Any, samples: Any) -> Told:
    """(loss, norm of the gradient) of each step."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    told = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = 0.0
        for batch in samples.microbatches(range(step * BATCH, (step + 1) * BATCH)):
            logits = model(input_ids=batch.tokens).logits
            total = functional.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
            )
            loss = total / (BATCH * SEQUENCE)
            loss.backward()
            mean += float(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        told.append((mean, float(norm)))
    return told


def alone(directory: Path, family: str) -> None:
    """In a process of its own, for megatron-core's samples want a process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = make_trial(directory / "run", PLAIN, **SAME).config
    data = open_data(config, Share(0, 1, torch.device("cpu")), directory / "cache")
    model = the_gpt() if family == "gpt" else the_llama()
    told = plain_loop(model.train(), data.training)
    (directory / "told.json").write_text(json.dumps(told))


def plain(family: str) -> Told:
    """What the loop has told of a family; each runs once."""

    def run(directory: Path) -> None:
        apart(alone, directory, family)

    told = json.loads((once(f"plain loop, {family}", run) / "told.json").read_text())
    learns = told[-1][0] < told[0][0] - 0.1
    assert learns, "so that each step depends on the ones before"
    return [(loss, norm) for loss, norm in told]


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("name", list(TABLE))
def test_several_processes_learn_what_one_does(name: str, trial: MakeTrial) -> None:
    spread = trial(TABLE[name], **SAME)
    assert spread.train() == [0] * spread.world_size
    assert [row.step for row in spread.rows] == list(range(1, STEPS + 1))
    one = plain(spread.config.model.family)
    losses = [abs(spread.losses[n] - loss) for n, (loss, _) in enumerate(one, start=1)]
    norms = [
        abs((row.grad_norm or 0) / norm - 1)
        for row, (_, norm) in zip(spread.rows, one, strict=True)
    ]
    seen = f"{name}: losses off by up to {max(losses):.1e}, norms by a share of {max(norms):.1e}"
    print(seen)
    assert max(losses) <= LOSS_TOLERANCE and max(norms) <= NORM_TOLERANCE, seen
