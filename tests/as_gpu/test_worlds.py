"""Each rank of 8, 64 and 512: fresh weights, checkpoint keys, buckets, optimizer ranges, shards.

Groups are fake (see `fake_worlds`), so this shows what ranks build and name, not what they send.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_worlds
import pytest
import torch
import world_checks
from fake_worlds import coordinate, fake_groups, optimizer_ranges, visit
from trial_runs import LIMIT_SECONDS, LLAMA, MODULE_GPT
from variants import varied

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.train_json import parse_train_config
from hpctrain.train.engines.megatron import model
from hpctrain.train.engines.native.assembly import wrapped_module
from hpctrain.train.engines.native.engine import NativeEngine, open_mesh, scale_and_clip
from hpctrain.train.rank_environment import Launch

LAYERS = 8
EXPERTS = dict(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32)
BASE: dict[str, Any] = dict(
    LLAMA,
    engine="megatron",
    transformer_impl="local",
    num_layers=LAYERS,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=8,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    ddp_bucket_size=20_000,
    optimizer_sharding="dp_reshardable",
)
# tp, pp, vpp, dp, ep, fields; the ranks of a world are all of it unless `WORLDS` gives a stride
WORLDS: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "8, dense": (2, 2, 1, 2, 1, {}),
    "8, experts": (2, 1, 1, 4, 4, EXPERTS),
    "8, interleaved and tied": (2, 2, 2, 2, 1, dict(share_embeddings_and_output_weights=True)),
    "64, dense": (4, 4, 1, 4, 1, {}),
    "64, experts": (2, 4, 1, 8, 8, EXPERTS),
    "512, dense": (8, 8, 1, 8, 1, {}),
    "512, experts": (2, 8, 1, 32, 8, EXPERTS),
}

# The others are between these.
ALWAYS = ("8, experts", "8, interleaved and tied", "512, dense")


def world_config(world: str, **changes: Any) -> MegatronConfig:
    tp, pp, vpp, dp, ep, fields = WORLDS[world]
    return layout_config(tp, pp, vpp, dp, ep, **{**fields, **changes})


def layout_config(tp: int, pp: int, vpp: int, dp: int, ep: int, **changes: Any) -> MegatronConfig:
    """The model of this file at a layout; every chunk has equally many layers."""
    document = dict(
        BASE,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_layer_split=[[LAYERS // pp // vpp] * vpp] * pp,
        data_parallel_size=dp,
        expert_model_parallel_size=ep,
        global_batch_size=2 * dp * pp,
    )
    config = parse_train_config(json.dumps({**document, **changes}))
    assert isinstance(config, MegatronConfig)
    return config


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """Return the result of a call in a fork: groups must not live where ranks are forked from."""
    reading, writing = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        writing.send(function(*given))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    writing.close()
    try:
        return reading.recv()
    except EOFError:
        raise AssertionError("see the traceback above") from None
    finally:
        process.join(LIMIT_SECONDS)


def sampled_ranks(config: MegatronConfig) -> list[int]:
    """Return all ranks of up to 64. Of more: each tensor, pipeline and expert coordinate once, and
    all data-parallel ranks of the first and the last model-parallel coordinate."""
    if config.world_size <= 64:
        return list(range(config.world_size))
    tp, dp = config.tensor_model_parallel_size, config.data_parallel_size
    pp, ep = config.pipeline_model_parallel_size, config.expert_model_parallel_size
    places = [(t, d, p) for p in range(pp) for d in range(dp) for t in range(tp)]  # tp first
    return [
        rank
        for rank, (t, d, p) in enumerate(places)
        if d < ep or (t, p) in ((0, 0), (tp - 1, pp - 1))
    ]


def surveyed(world: str) -> list[str]:
    """Visit the ranks; return what is wrong with keys, weights and buffers."""
    config = world_config(world)
    ranks = sampled_ranks(config)
    whole = visit(layout_config(1, 1, 1, 1, 1, **WORLDS[world][5]), 0, keep=True)
    wanted = {part.key: part.global_shape for part in whole.parts}
    places, problems = [], []
    for rank in ranks:
        place = visit(config, rank, kind="dp_reshardable", keep=True)
        problems += [f"rank {rank}: {word}" for word in world_checks.wrong_buffers(place.buffers)]
        own = {where: one for where, one in place.tensors.items() if where[0] in wanted}
        problems += world_checks.wrong_numbers(
            [fake_worlds.Place(rank, [], [], [], own)], whole.tensors
        )
        place.tensors.clear()
        places.append(place)
    if len(ranks) < config.world_size:
        places = world_checks.without_optimizers_of_absent_ranks(places, config)
    problems += world_checks.wrong_coverage(places, wanted)
    problems += world_checks.wrong_replicas(
        [
            fake_worlds.Place(p.rank, [q for q in p.parts if q.key in wanted], [], [], {})
            for p in places
        ]
    )
    problems += world_checks.equal_pieces(whole, "experts")
    return problems


@pytest.mark.parametrize("world", varied(WORLDS, *ALWAYS))
def test_every_rank_builds_its_part_of_one_model(world: str) -> None:
    """Weights are those of the model on one rank, at the rank's place: equal on replicas, distinct
    over tp, pp and ep. Checkpoint keys, with the optimizer's, cover everything once."""
    assert apart(surveyed, world) == []


def with_one_generator(world: str) -> list[str]:
    """As megatron-core initialises on CPUs: every rank draws its part from the same seed."""

    def draw(seed: int, chunks: list[Any]) -> None:
        torch.manual_seed(seed)
        for chunk in chunks:
            for weight in chunk.parameters():
                if weight.dim() > 1:
                    torch.nn.init.normal_(weight, 0.0, 0.02)

    from hpctrain.train.engines.megatron import model

    model.draw_weights = draw
    return surveyed(world)


def test_copied_experts_would_show() -> None:
    """GPU_PATH: the experts of all expert-parallel ranks used to be those of rank 0."""
    problems = apart(with_one_generator, "8, experts")
    assert any("experts" in problem and "whole model's" in problem for problem in problems)
    assert model.draw_weights is not None


def owners(dp: int, ep: int, fields: dict[str, Any]) -> list[str]:
    config = layout_config(2, 2, 1, dp, ep, **fields)
    by_rank = {rank: optimizer_ranges(config, rank) for rank in range(config.world_size)}
    return world_checks.wrong_ownership(by_rank)


@pytest.mark.parametrize(
    ("dp", "ep", "fields"), [(2, 1, {}), (16, 1, {}), (16, 8, EXPERTS)], ids=["8", "64", "experts"]
)
def test_each_element_has_one_owner(dp: int, ep: int, fields: dict[str, Any]) -> None:
    """The distributed optimizer's ranges tile every parameter over its data-parallel group."""
    assert apart(owners, dp, ep, fields) == []


def buckets_at(dp: int) -> list[Any]:
    """Return for the first rank which parameters are in which bucket, in order."""
    config = layout_config(2, 2, 1, dp, 1)
    buffers = visit(config, 0).buffers
    return [
        [
            [[name, place[2]] for name, place in sorted(one["ranges"].items())],
            [bucket[2] for bucket in one["buckets"]],
        ]
        for one in buffers
    ]


def test_elastic_sizes_have_the_same_buckets() -> None:
    """`ddp_bucket_size` promises it: checkpoints of dp_reshardable depend on it."""
    first, *others = [apart(buckets_at, dp) for dp in (1, 2, 8, 32)]
    assert len(first[0][1]) > 2, "several buckets, or nothing is compared"
    assert all(other == first for other in others)


# fewer rows than ranks: token types of BERT, the class token of ViT, the classes of a classifier
NARROW: dict[str, dict[str, Any]] = {
    "bert": dict(model=dict(family="bert", vocab=250, seq=32), task="masked_language_modeling"),
    "bert, 2 classes": dict(
        model=dict(family="bert", vocab=250, seq=32, classes=2), task="classification"
    ),
    "vit": dict(model=dict(family="vit", image=32, patch=8, vocab=10), task="classification"),
    "gpt": dict(model=dict(family="gpt", vocab=250, seq=32), task="language_modeling"),
}


def shards_at(name: str, world_size: int) -> list[Any]:
    """Wrap the module on each rank; return how many shards are empty, and whether all reductions
    over parameters and gradients pass."""
    shape = {**dict(layers=2, hidden=64, heads=4, ffn=128), **NARROW[name]["model"]}
    document = dict(
        MODULE_GPT,
        engine="fsdp",
        shard_size=world_size,
        data_parallel_size=world_size,
        global_batch_size=2 * world_size,
        task=NARROW[name]["task"],
        model=shape,
    )
    config: Any = parse_train_config(json.dumps(document))
    empty, passed = [], []
    for rank in {0, 1, 2, world_size // 2, world_size - 1} & set(range(world_size)):
        with fake_groups(rank, world_size):
            mesh = open_mesh(config, Launch(rank, world_size, 0, "node", 0, ""))
            module = wrapped_module(config, mesh, initialize=False)
            for weight in module.parameters():
                weight.detach().to_local().fill_(1.0)
                weight.grad = torch.ones_like(weight)
            empty.append(sum(w.to_local().numel() == 0 for w in module.parameters()))
            finite = NativeEngine.weights_are_finite(SimpleNamespace(module=module))  # type: ignore[arg-type]
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
            norm = scale_and_clip(optimizer, torch.tensor(1.0), 1.0)
            optimizer.step()
            passed.append(finite and bool(torch.isfinite(torch.as_tensor(norm))))
    return [sum(empty), all(passed)]


SIZES = (8, 64, 512)


@functools.cache
def all_shards() -> dict[tuple[str, int], list[Any]]:
    """Visit every case in one fork, which imports transformers' models once."""
    cases = [(name, size) for name in NARROW for size in SIZES]
    found = apart(lambda: [shards_at(name, size) for name, size in cases])
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", NARROW)
def test_empty_shards_pass_every_reduction(name: str, world_size: int) -> None:
    """Ranks beyond a weight's rows have nothing of it. First, last and middle ranks."""
    empty, passed = all_shards()[name, world_size]
    assert passed
    assert empty > 0 or (name, world_size) == ("gpt", 8), "the case that is tested"


def test_groups_of_a_coordinate_are_those_of_the_layout() -> None:
    def places() -> list[Any]:
        config = world_config("64, experts")
        with coordinate(config, 37) as mesh:
            return [mesh.tensor_rank, mesh.data_rank, mesh.pipeline_rank]

    assert apart(places) == [37 % 2, 37 // 2 % 8, 37 // 16]
