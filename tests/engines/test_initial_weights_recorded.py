"""What modules' own initialisers do to weights is recorded on meta, and repeated in parts."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import ks_2samp
from test_models_build import CPU, SHAPES, config_of, equal
from torch import nn
from variants import varied

from hpctrain.base.errors import InvalidInputError
from hpctrain.engines.train_json import parse_train_config
from hpctrain.train.engines.models.allocation import allocate, slice_offsets
from hpctrain.train.engines.models.build import build_module, build_on_meta
from hpctrain.train.engines.models.initialisers import initial_weight, recording

SIZE = (64, 96)


def recorded(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    """A module whose weights are on meta, with their records."""
    with recording() as recorder:
        module = build()
        recorder.finish(module, seed)
    return module


def drawn(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    module = recorded(build, seed)
    allocate(module, CPU, draw=True)
    return module


# -- models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", varied(SHAPES, "gpt", "llama"))
def test_weights_are_distributed_as_transformers_draws_them(name: str) -> None:
    """Constants and buffers are equal; others by a test of Kolmogorov and Smirnov (fixed seeds)."""
    ours = build_module(config_of(name), device=CPU)
    theirs = build_module(config_of(name, initial_weights="generator"), device=CPU)
    random = 0
    for (key, mine), (other, wanted) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert key == other and mine.shape == wanted.shape
        assert mine.requires_grad == wanted.requires_grad
        one, two = mine.detach().flatten(), wanted.detach().flatten()
        if (two == two[0]).all():
            assert torch.equal(one, two), key
            continue
        random += 1
        assert ks_2samp(one.numpy(), two.numpy()).pvalue > 1e-5, key
        assert float(one.std() / two.std()) == pytest.approx(1, abs=5 / math.sqrt(len(one))), key
    assert random >= 6
    buffers = dict(theirs.named_buffers())
    assert dict(ours.named_buffers()).keys() == buffers.keys()
    for key, buffer in ours.named_buffers():
        assert torch.equal(buffer, buffers[key]) and buffer.dtype == buffers[key].dtype, key


@pytest.mark.parametrize("name", ["gpt", "llama", "vit", "resnet-18"])
def test_other_names_and_seeds_are_other_numbers(name: str) -> None:
    first, second = (build_module(config_of(name, seed=seed), device=CPU) for seed in (1, 2))
    seen = set()
    for (key, one), (_, two) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        if one.dim() > 1 and one.std() > 0:
            assert not torch.equal(one, two), key
            seen.add(float(one.flatten()[0] / one.std()))
    matrices = [p for p in first.parameters() if p.dim() > 1 and p.std() > 0]
    assert len(seen) == len(matrices), "two weights begin with the same number"


def test_adapters_begin_at_nothing_beside_the_weights_of_the_plain_model() -> None:
    plain = build_module(config_of("llama"), device=CPU)
    tuned = build_module(config_of("llama", lora=dict(rank=4)), device=CPU)
    pairs = dict(tuned.named_parameters())
    first = [weight for key, weight in pairs.items() if "lora_A" in key]
    second = [weight for key, weight in pairs.items() if "lora_B" in key]
    assert len(first) == len(second) == 14
    assert all(weight.std() > 0.01 for weight in first) and not any(w.any() for w in second)
    assert len({float(weight.flatten()[0]) for weight in first}) == len(first)
    frozen = {key: w for key, w in pairs.items() if "lora_" not in key}
    for key, weight in plain.named_parameters():
        owner, _, last = key.rpartition(".")
        there = f"base_model.model.{owner}"
        found = frozen.get(f"{there}.{last}")
        found = frozen[f"{there}.base_layer.{last}"] if found is None else found
        assert torch.equal(found, weight), key


def test_documents_of_older_versions_keep_the_weights_of_torchs_generator() -> None:
    """A run with LoRA draws its frozen weights again at each start."""
    document = json.loads(config_of("gpt", lora=dict(rank=2)).model_dump_json())
    del document["initial_weights"]
    old = build_module(parse_train_config(json.dumps(document)), device=CPU)  # type: ignore[arg-type]
    torch.manual_seed(config_of("gpt").seed)
    theirs = type(old.base_model.model)(old.base_model.model.config)
    found = old.base_model.model.transformer.h[1].mlp.c_fc.base_layer.weight
    assert torch.equal(found, theirs.transformer.h[1].mlp.c_fc.weight)
    new = build_module(config_of("gpt", lora=dict(rank=2)), device=CPU)
    assert not equal(old, new)


# -- initialisers ----------------------------------------------------------------------------


class One(nn.Module):
    """A weight, and what is done to it."""

    def __init__(self, act: Callable[[Any], Any], values: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE) if values is None else values())
        with torch.no_grad():
            act(self.weight)


def rows(weight: Any) -> None:
    nn.init.normal_(weight, std=0.1)
    nn.init.zeros_(weight[5])


INITIALISERS: dict[str, Callable[[Any], Any]] = {
    "normal": lambda weight: nn.init.normal_(weight, 1.0, 0.1),
    "data.normal": lambda weight: weight.data.normal_(mean=0.2, std=0.1),
    "uniform": lambda weight: nn.init.uniform_(weight, -1.0, 3.0),
    "uniform, defaults": lambda weight: weight.uniform_(),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.5, a=-0.4, b=1.0),
    "xavier": nn.init.xavier_uniform_,
    "kaiming": lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out"),
    "constant": lambda weight: nn.init.constant_(weight, 0.7),
    "ones": nn.init.ones_,
    "filled": lambda weight: weight.fill_(torch.tensor(0.3)),
    "a row": rows,
    "a table": lambda weight: weight.copy_(torch.arange(SIZE[1]) / SIZE[1]),
    "twice": lambda weight: nn.init.normal_(nn.init.uniform_(weight), std=0.1),
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_an_initialiser_is_repeated(name: str) -> None:
    module = drawn(lambda: One(INITIALISERS[name]))
    torch.manual_seed(3)
    expected = One(INITIALISERS[name]).weight.detach()
    found = module.weight.detach()
    assert isinstance(found, torch.Tensor) and type(module.weight) is nn.Parameter
    if name in ("constant", "ones", "filled", "a table"):
        assert torch.equal(found, expected)
    else:
        assert ks_2samp(found.flatten().numpy(), expected.flatten().numpy()).pvalue > 1e-4
        assert torch.equal(found == 0, expected == 0)


@pytest.mark.parametrize("name", INITIALISERS)
def test_parts_are_those_of_the_whole(name: str) -> None:
    whole = drawn(lambda: One(INITIALISERS[name])).weight.detach()
    weight = initial_weight(recorded(lambda: One(INITIALISERS[name])).weight)
    for cut in ((slice(3, 40), slice(None)), (slice(None), slice(17, 50)), (slice(5, 6), slice(2))):
        part = torch.empty_like(whole[cut])
        view = torch.empty(SIZE, device="meta")[cut]
        offsets = slice_offsets(view.storage_offset(), SIZE)
        weight.draw(part, offsets=offsets)
        assert torch.equal(part, whole[cut])
    flat = torch.empty(1234)
    weight.draw_range(flat, 321)
    assert torch.equal(flat, whole.flatten()[321 : 321 + 1234])


@pytest.mark.parametrize(
    "values", [lambda: torch.randn(SIZE), lambda: torch.ones(SIZE), lambda: torch.eye(*SIZE)]
)
def test_values_that_a_weight_is_made_with_are_kept(values: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    expected = values()
    torch.manual_seed(3)
    assert torch.equal(drawn(lambda: One(lambda _: None, values)).weight, expected)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda weight: None, "no initialiser writes into it"),
    "orthogonal": (nn.init.orthogonal_, "uses aten"),
    "product": (lambda weight: weight.normal_().mul_(0.1), "uses aten.mul_.Tensor"),
    "some rows": (lambda weight: weight[:3].normal_(), r"normal_.default on a tensor \[3, 96\]"),
    "columns": (lambda weight: weight.fill_(1.0)[:, :3].zero_(), "uses aten.zero_.default"),
    "replaced": (lambda weight: setattr(weight, "data", weight * 2), "the result of an operation"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_initialiser_that_cannot_be_repeated_in_parts_is_refused(name: str) -> None:
    act, words = REFUSED[name]
    with pytest.raises(InvalidInputError, match=f"weight: its initial values cannot .*{words}"):
        recorded(lambda: One(act))


def test_what_follows_a_refused_operation_counts() -> None:
    act = lambda weight: nn.init.ones_(nn.init.orthogonal_(weight))  # noqa: E731
    assert torch.equal(drawn(lambda: One(act)).weight, torch.ones(SIZE))


def test_a_memory_address_that_is_used_again_is_another_weight() -> None:
    """What was recorded for memory that is free again must not reach the next weight there."""

    def build() -> nn.Module:
        layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(50)))
        for layer in layers:
            layer.weight.data = layer.weight.data * 2
        return layers

    with pytest.raises(InvalidInputError) as caught:
        recorded(build)
    assert len(caught.value.problems) == 50


def test_a_copy_has_the_values_of_its_source() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(8, 8)
        layer.bias.data = layer.bias.data.clone()
        return layer

    assert torch.equal(drawn(build).bias, drawn(lambda: nn.Linear(8, 8)).bias)


def test_weights_that_share_memory_before_they_are_registered() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.arange(12.0).view(2, 6)
            self.first, self.second = (nn.Parameter(half) for half in both)
            self.third = nn.Parameter(kept := torch.ones(6))
            kept.fill_(2.0)

    found = drawn(Halves)
    expected = torch.arange(12.0)
    assert torch.equal(found.first, expected[:6]) and torch.equal(found.second, expected[6:])
    assert torch.equal(found.third, torch.full((6,), 2.0))


def test_shared_weights_stay_shared_and_attributes_stay() -> None:
    def build() -> nn.Module:
        pair = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        pair[1].weight = pair[0].weight
        pair[0].weight.marked = True
        return pair

    pair = drawn(build)
    assert pair[0].weight is pair[1].weight and pair[0].weight.marked


def test_modules_are_built_as_ever_afterwards() -> None:
    before = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_
    with pytest.raises(ZeroDivisionError), recording():
        raise ZeroDivisionError
    assert (nn.Module.register_parameter, nn.init._no_grad_trunc_normal_) == before
    module = build_on_meta(config_of("gpt"), record=True)
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert nn.Linear(2, 2).weight.device == CPU
    assert copy.deepcopy(module).lm_head.weight.device.type == "meta"
