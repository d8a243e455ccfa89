"""Equal seeds give equal models on every layout, and a rank draws and stores its own part only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from trial_runs import LIMIT_SECONDS, MODULE_GPT, PLAIN, PLAIN_LLAMA, ZERO, apart, wrap
from variants import varied

from bench import prefork
from hpctrain.engines.train_json import parse_train_config
from hpctrain.train import initial_weights
from hpctrain.train.engines.models.allocation import allocate
from hpctrain.train.engines.models.build import build_module
from hpctrain.train.initial_weights import initial_weight
from hpctrain.train.rank_environment import read_launch

CPU = torch.device("cpu")
FSDP: dict[str, Any] = dict(PLAIN, engine="fsdp")
RESNET: dict[str, Any] = dict(
    model=dict(family="resnet", layers=18, vocab=10, image=32), task="classification"
)
VIT: dict[str, Any] = dict(
    model=dict(family="vit", layers=1, hidden=32, heads=4, ffn=64, vocab=10, image=16, patch=4),
    task="classification",
)
LLAMA = dict(model=PLAIN_LLAMA["model"])
TENSORS: dict[str, Any] = dict(ZERO, **LLAMA, tensor_parallel=2, data_parallel_size=1)
THREE: dict[str, Any] = dict(
    ZERO, **LLAMA, zero_stage=3, data_parallel_size=3, global_batch_size=12
)


def over(ranks: int, base: dict[str, Any] = FSDP, shards: int | None = None) -> dict[str, Any]:
    return {**base, "data_parallel_size": ranks, "shard_size": shards or ranks}


# the document; of how many shards a rank draws one; how many copies of the model all ranks draw
LAYOUTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "ddp 2": (dict(PLAIN, data_parallel_size=2), 1, 2),
    "fsdp 1": (over(1), 1, 1),
    "fsdp 2": (over(2), 2, 1),
    "fsdp 4": (over(4), 4, 1),
    "fsdp 4, offload": (dict(over(4), cpu_offload=True), 4, 1),
    "fsdp 3, llama": (dict(over(3), **LLAMA), 3, 1),
    "fsdp 2, lora": (dict(over(2), lora=dict(rank=4)), 2, 1),
    "fsdp 2, resnet": (dict(over(2), **RESNET), 2, 1),
    "fsdp 3, vit": (dict(over(3), **VIT), 3, 1),
    "hsdp 2 x 2": (over(4, shards=2), 2, 2),
    "ZeRO 1": (dict(ZERO, zero_stage=1), 1, 2),
    "ZeRO 2": (dict(ZERO, zero_stage=2), 1, 2),
    "ZeRO 3": (dict(ZERO, zero_stage=3), 2, 1),
    "ZeRO 3, three ranks": (THREE, 3, 1),
    "ZeRO 3, lora": (dict(ZERO, zero_stage=3, lora=dict(rank=4)), 2, 1),
}


def built(config: Any, mesh: Any) -> Any:
    """The rank's module, before an optimizer or gradients."""
    if config.engine == "deepspeed":
        from hpctrain.train.engines.deepspeed.assembly import placed_module, staged_module

        build = staged_module if config.pipeline_stages else placed_module
        return build(config, mesh, initialize=True)
    from hpctrain.train.engines.native.assembly import wrapped_module

    module = wrapped_module(config, mesh, initialize=True)
    return module.module if config.engine == "ddp" else module


def join(config: Any) -> Any:
    if config.engine == "deepspeed":
        from hpctrain.train.engines.deepspeed import assembly as deepspeed_assembly

        return deepspeed_assembly.join(config, read_launch(os.environ))
    from hpctrain.train.engines.native import assembly

    return assembly.join(config, read_launch(os.environ))


def whole_weights(module: Any) -> dict[str, torch.Tensor]:
    """All weights, which all ranks gather; all ranks must call this."""
    found = {}
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            value = parameter.detach()
            found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def count_drawn() -> list[int]:
    """From now on: how many elements are drawn each time."""
    drawn: list[int] = []

    @wrap(initial_weights, "fill")
    def fill(original: Any, part: torch.Tensor, *given: Any, **named: Any) -> None:
        drawn.append(part.numel())
        original(part, *given, **named)

    return drawn


def run_ranks(document: dict[str, Any], directory: Path, gather: Any) -> list[Any]:
    """On real ranks: (weights by `gather`, buffers, number of drawn elements) of each."""
    config: Any = parse_train_config(json.dumps(document))

    def work() -> None:
        torch.set_num_threads(1)
        mesh, drawn = join(config), count_drawn()
        module = built(config, mesh)
        buffers = {key: buffer.clone() for key, buffer in module.named_buffers()}
        torch.save((gather(module), buffers, sum(drawn)), directory / f"{mesh.rank}.pt")
        dist.barrier()

    ranks = prefork.fork(work, config.world_size, directory / "logs")
    codes = ranks.wait(LIMIT_SECONDS)
    assert codes == [0] * config.world_size, ranks.log(0)
    return [torch.load(directory / f"{rank}.pt") for rank in range(config.world_size)]


ALWAYS = ("hsdp 2 x 2",)


@pytest.mark.parametrize("name", varied(LAYOUTS, *ALWAYS))
def test_every_layout_begins_with_the_model_of_one_process(name: str, tmp_path: Path) -> None:
    document, shards, copies = LAYOUTS[name]
    one = build_module(parse_train_config(json.dumps(document)), device=CPU)  # type: ignore[arg-type]
    expected = {key: weight.detach() for key, weight in one.named_parameters()}
    buffers = dict(one.named_buffers())
    total, drawn = sum(weight.numel() for weight in expected.values()), []
    for weights, found_buffers, count in run_ranks(document, tmp_path, whole_weights):
        assert weights.keys() == expected.keys()
        for key, weight in weights.items():
            assert torch.equal(weight, expected[key]), key
        assert found_buffers.keys() == buffers.keys()
        for key, buffer in found_buffers.items():
            assert torch.equal(buffer, buffers[key]), key
        drawn.append(count)
    assert sum(drawn) == total * copies, "each element is drawn once in each copy"
    # rows are divided, and the remainder is at most one row of each weight
    rows = sum(weight[:1].numel() for weight in expected.values())
    assert max(drawn) <= total / shards + rows


def own_parts(module: Any) -> dict[str, torch.Tensor]:
    return {initial_weight(weight).name: weight.detach() for weight in module.parameters()}


SPLITS: dict[str, dict[str, Any]] = {
    "tp 2": dict(TENSORS),
    "tp 2, uneven words, tied": dict(
        TENSORS, model={**PLAIN_LLAMA["model"], "vocab": 251, "tied": True, "bias": True},
        vocab_size=251,
    ),
    "pp 2": dict(ZERO, pipeline_stages=(1, 1), data_parallel_size=1),
    "tp 2 x pp 2": dict(TENSORS, pipeline_stages=(1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", varied(SPLITS, "tp 2, uneven words, tied", "tp 2 x pp 2"))
def test_parts_of_split_weights_and_stages_are_those_of_one_model(
    name: str, tmp_path: Path
) -> None:
    document = SPLITS[name]
    one = build_module(parse_train_config(json.dumps(document)), device=CPU)  # type: ignore[arg-type]
    expected = {key: weight.detach() for key, weight in one.named_parameters()}
    ranks = run_ranks(document, tmp_path, own_parts)
    assert {key for weights, *_ in ranks for key in weights} == expected.keys()
    for key, wanted in expected.items():
        parts = [weights[key] for weights, *_ in ranks if key in weights]
        if parts[0].shape != wanted.shape:
            # ranks of a group are neighbours, in the order of their parts
            assert len(parts) == 2 or document.get("pipeline_stages")
            axis = 0 if parts[0].shape[1:] == wanted.shape[1:] else 1
            parts = [torch.cat(parts[at : at + 2], axis) for at in range(0, len(parts), 2)]
        for part in parts:
            assert torch.equal(part, wanted), key
    for weights, _, drawn in ranks:
        assert drawn == sum(weight.numel() for weight in weights.values())


# -- no rank waits, and none has the memory of a model ----------------------------------------


@pytest.mark.variant("test_every_layout_begins_with_the_model_of_one_process")
@pytest.mark.parametrize("base", [over(2), dict(over(2), **LLAMA)])
def test_no_rank_of_fsdp_waits_for_another_one(base: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 does not begin to build before rank 1 has finished."""
    config: Any = parse_train_config(json.dumps(base))

    def work() -> None:
        mesh = join(config)
        if mesh.rank == 1:
            built(config, mesh)
        dist.barrier()  # of rank 0 alone with what rank 1 does next, if it had waited
        if mesh.rank == 0:
            built(config, mesh)

    ranks = prefork.fork(work, 2, tmp_path / "logs")
    assert ranks.wait(60) == [0, 0], ranks.log(1)


# 234 MB in fp32, of which the embedding and the output layer are 66 MB each
LARGE: dict[str, Any] = dict(
    MODULE_GPT,
    model=dict(
        family="llama", layers=8, hidden=512, ffn=1376, heads=8, vocab=32_000, seq=32, tied=False
    ),
    vocab_size=32_000,
    data_parallel_size=64,
    global_batch_size=128,
)


ZERO_3 = dict(engine="deepspeed", zero_stage=3)


def measure_peak(document: dict[str, Any], directory: Path) -> None:
    """In a process of its own, one of 64 ranks whose others are not there: write figures.

    Linux counts the most memory that a process has had (proc_pid_clear_refs(5), value 5).
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # which writes into new memory where it may
    config: Any = parse_train_config(json.dumps(document))
    dist.init_process_group("fake", rank=5, world_size=64, store=FakeStore())
    small = json.dumps({**document, "model": {**document["model"], "hidden": 64, "vocab": 128}})
    mesh = lone_mesh(config)
    built(parse_train_config(small), mesh)  # imports
    drawn = count_drawn()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    module = built(config, mesh)
    figures = dict(
        grown=peak_bytes() - before,
        drawn=sum(drawn),
        stored=sum(stored_elements(parameter) for parameter in module.parameters()),
    )
    (directory / "figures.json").write_text(json.dumps(figures))


def lone_mesh(config: Any) -> Any:
    """What `open_mesh` returns, over the fake process group."""
    os.environ.update(RANK="5", WORLD_SIZE="64", LOCAL_RANK="5")
    if config.engine == "deepspeed":
        from datetime import timedelta

        from hpctrain.train.engines.deepspeed import mesh
        from hpctrain.train.engines.deepspeed.mesh import DeepSpeedMesh

        mesh.join(timedelta(minutes=1))
        return DeepSpeedMesh(
            device=CPU, rank=5, size=64, replicas=64, stages=1, stage=0, replica=5,
            control=None, tensors=None, data=None, pipeline=(5,),
        )  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh

    from hpctrain.train.engines.native.engine import NativeMesh

    shards = init_device_mesh("cpu", (64,), mesh_dim_names=("shard",))
    return NativeMesh(device=CPU, rank=5, size=64, control=None, shards=shards)


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def stored_elements(parameter: Any) -> int:
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_tensor.numel())
    return int(parameter.to_local().numel())


@pytest.mark.variant("test_every_layout_begins_with_the_model_of_one_process")
@pytest.mark.parametrize(
    "document",
    [dict(LARGE, engine="fsdp", shard_size=64), {**ZERO, **LARGE, **ZERO_3}],
    ids=["fsdp", "deepspeed"],
)
def test_the_start_costs_a_rank_its_part(document: dict[str, Any], tmp_path: Path) -> None:
    apart(measure_peak, document, tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    total = sum(
        weight.numel()
        for weight in build_module(
            parse_train_config(json.dumps(document)),  # type: ignore[arg-type]
            device=torch.device("meta"),
        ).parameters()
    )
    print(f"{total} weights, {figures}")
    assert total > 58e6
    # DeepSpeed keeps small weights whole: they are drawn in parts all the same
    assert figures["drawn"] <= figures["stored"] < total / 50
    assert figures["drawn"] == pytest.approx(total / 64, rel=0.02)
    assert figures["grown"] < 24 * 2**20, "a model has 234 MB, its largest weight 66 MB"


def test_slices_of_meta_tensors_are_allocated_at_their_place() -> None:
    """As DeepSpeed's layers cut a weight by its inputs."""
    config: Any = parse_train_config(json.dumps({**PLAIN, **LLAMA}))
    whole = build_module(config, device=CPU).model.layers[1].mlp.down_proj.weight
    from hpctrain.train.engines.models.build import build_on_meta

    module = build_on_meta(config, record=True)
    cut = module.model.layers[1].mlp.down_proj.weight
    cut.data = cut.data[:, 40:72]
    allocate(module, CPU, draw=True)
    assert torch.equal(module.model.layers[1].mlp.down_proj.weight, whole[:, 40:72])
