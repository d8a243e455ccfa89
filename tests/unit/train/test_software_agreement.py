"""What ranks find is judged before any process group exists: pure, for any number of nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.kept_code import archive_name, use_archive
from hpctrain.records.layout import RunLayout
from hpctrain.records.software import (
    Library,
    SoftwareFacts,
    of_newest_launch,
    read_lock,
    read_software,
    write_software,
)
from hpctrain.train import software_agreement
from hpctrain.train.faults import RefusedElsewhereError
from hpctrain.train.job import Job
from hpctrain.train.software import LibraryProblem
from hpctrain.train.software_agreement import (
    Needs,
    RankSoftware,
    Refusal,
    judge,
    records_of,
    refuse,
    unequal_nodes,
)

GOOD = SoftwareFacts(
    python="3.11.7",
    torch="2.13.0+cu130",
    cuda_build="13.0",
    driver="580.65.06",
    driver_cuda="13.0",
    nccl="2.28.3",
    gpus=("NVIDIA H100",) * 2,
    hpctrain="0.1.0",
    megatron_core="0.16.1",
    transformer_engine=Library(version="2.9.0"),
    triton=Library(version="3.5.0"),
    compiler="/usr/bin/gcc",
    open_files=65536,
)
NEEDS = Needs(cuda=True, world_size=4, compiles=True, engine_reason="cp 2", hpctrain="0.1.0")


def ranks(**on_node: SoftwareFacts) -> list[RankSoftware]:
    """Two ranks on each node, each with a GPU of its own."""
    return [
        RankSoftware(
            rank=2 * number + local,
            local_rank=local,
            node=node,
            facts=facts,
            gpu_ids=tuple(f"{node}-{index}" for index in range(len(facts.gpus))),
        )
        for number, (node, facts) in enumerate(on_node.items())
        for local in range(2)
    ]


def changed(**fields: object) -> SoftwareFacts:
    return GOOD.model_copy(update=fields)


def test_good_nodes_are_accepted() -> None:
    assert list(judge(ranks(n0=GOOD, n1=GOOD), NEEDS)) == []


def test_what_an_engine_finds_wrong_is_refused_on_its_nodes() -> None:
    """For example a private name that one node's megatron-core lacks."""
    problem = LibraryProblem("megatron-core lacks a name", "install another")
    several = [
        rank.model_copy(update={"problems": (problem,)}) if rank.node == "n1" else rank
        for rank in ranks(n0=GOOD, n1=GOOD)
    ]
    (refusal,) = judge(several, NEEDS)
    assert (refusal.message, refusal.hint) == problem
    assert refusal.nodes == ("n1",) and not refusal.everywhere


NO_CUDA = changed(torch="2.13.0+cpu", cuda_build=None, gpus=(), driver_cuda=None)


@pytest.mark.parametrize(
    "facts, words",
    [
        (NO_CUDA, "torch 2.13.0+cpu is built without CUDA"),
        (
            changed(driver="535.104.05", driver_cuda="12.2", gpus=()),
            "535.104.05 supports CUDA 12.2, and torch 2.13.0+cu130 is built for CUDA 13.0",
        ),
        (changed(gpus=(), gpu_error="No CUDA GPUs are available"), "finds no GPU: No CUDA GPUs"),
        (
            changed(transformer_engine=Library(error="ImportError: undefined symbol: _ZN3c10")),
            "cp 2 needs TransformerEngine: cannot be imported (ImportError: undefined",
        ),
        (changed(transformer_engine=Library()), "cp 2 needs TransformerEngine: not installed"),
        (changed(triton=Library()), "fused kernels with triton: not installed"),
        (changed(hpctrain="0.0.9"), "hpctrain 0.0.9 trains, and hpctrain 0.1.0 supervises"),
        (changed(compiler=None), "triton needs a C compiler"),
        (changed(open_files=256), "at most 256 open files are allowed, and 4 ranks need 260"),
    ],
)
def test_a_problem_of_every_node_is_one_refusal_of_the_settings(
    facts: SoftwareFacts, words: str
) -> None:
    (refusal,) = judge(ranks(n0=facts, n1=facts), NEEDS)
    assert words in refusal.message and refusal.hint
    assert refusal.everywhere and refusal.nodes == ("n0", "n1")
    for node in ("n0", "n1"):
        with pytest.raises(InvalidInputError) as caught:
            refuse([refusal], node)
        assert not caught.value.node_dependent


def test_a_problem_of_one_node_names_it_on_all_ranks() -> None:
    facts = changed(gpus=(), gpu_error="No CUDA GPUs are available")
    found = list(judge(ranks(n0=GOOD, n1=facts, n2=GOOD), NEEDS))
    (refusal,) = found
    assert refusal.nodes == ("n1",) and not refusal.everywhere
    with pytest.raises(InvalidInputError, match="on n1: torch 2") as caught:
        refuse(found, "n1")
    assert caught.value.node_dependent
    with pytest.raises(RefusedElsewhereError, match="on n1: "):
        refuse(found, "n2")


def test_a_lost_gpu_is_found_by_what_ranks_would_share() -> None:
    found = list(judge(ranks(n0=GOOD, n1=changed(gpus=("NVIDIA H100",))), NEEDS))
    (refusal,) = found
    assert refusal.nodes == ("n1",)
    expected = "1 GPUs are visible to the 2 ranks of the node: ranks 2 and 3 would share one"
    assert refusal.message == expected


def test_one_visible_gpu_for_each_task_is_shared_by_nobody() -> None:
    facts = changed(gpus=("NVIDIA H100",))
    bound = [
        RankSoftware(rank=n, local_rank=n, node="n0", facts=facts, gpu_ids=(f"GPU-{n}",))
        for n in range(4)
    ]
    assert list(judge(bound, NEEDS)) == []


def test_the_odd_version_is_the_one_of_fewer_nodes() -> None:
    odd = changed(megatron_core="0.17.0")
    (refusal,) = judge(ranks(n0=odd, n1=GOOD, n2=GOOD), NEEDS)
    assert refusal.nodes == ("n0",)
    assert refusal.message == "megatron-core is 0.17.0 there, and 0.16.1 on the other nodes"


@pytest.mark.parametrize("facts", [{"nccl": "2.27.5"}, {"code": "0123456789ab"}])
def test_messages_and_code_of_hpctrain_are_the_same_on_all_nodes(facts: dict[str, str]) -> None:
    found = ranks(n0=GOOD, n1=changed(**facts), n2=GOOD)
    (refusal,) = judge(found, NEEDS)
    assert refusal.nodes == ("n1",) and list(unequal_nodes(found)) == []


def test_nodes_may_be_upgraded_one_after_the_other() -> None:
    found = ranks(n0=GOOD, n1=changed(driver="590.1"), n2=GOOD)
    assert list(judge(found, NEEDS)) == []
    message = "driver is 590.1 there, and 580.65.06 on the other nodes: n1"
    assert list(unequal_nodes(found)) == [message]


def test_without_gpus_nothing_about_them_is_needed() -> None:
    needs = Needs(cuda=False, world_size=2)
    facts = NO_CUDA.model_copy(
        update=dict(transformer_engine=Library(), triton=Library(), compiler=None)
    )
    assert list(judge(ranks(n0=facts), needs)) == []


def test_equal_facts_are_one_line(tmp_path: Path) -> None:
    odd = changed(driver="570.1")
    run = RunLayout(tmp_path)
    write_software(run, records_of(ranks(n0=GOOD), epoch=1))
    write_software(run, records_of(ranks(n0=GOOD, n1=odd, n2=GOOD), epoch=2))
    assert [line.epoch for line in read_software(run)] == [1, 2, 2]
    lines = of_newest_launch(read_software(run))
    assert [(line.nodes, line.ranks, line.facts) for line in lines] == [
        (("n0", "n2"), 4, GOOD),
        (("n1",), 2, odd),
    ]
    assert len(run.software.read_text().splitlines()) == 3


def test_no_refusal_raises_nothing() -> None:
    refuse([], "n0")
    with pytest.raises(RefusedElsewhereError):
        refuse([Refusal(message="m", hint=None, nodes=("n1",), everywhere=False)], "n0")


def test_the_lock_after_an_upgrade_is_of_the_code_that_it_chose(tmp_path: Path) -> None:
    """An attempt goes on with the code it began with: its launches write no lock for the next."""
    run = RunLayout(tmp_path / "run-7f3a")
    run.create()
    run.metrics.touch()
    old, new = "0" * 12, "1" * 12
    config = SimpleNamespace(checkout_directory=None)
    job = cast(Job, SimpleNamespace(run=run, launch=SimpleNamespace(epoch=3), config=config))
    for code, locked in ((old, None), (new, new), (old, new)):
        use_archive(run, archive_name("0.2.0", new))
        found = software_agreement._changes_of_run(GOOD.model_copy(update={"code": code}), job)
        lock = read_lock(run)
        assert (lock and lock.parts["hpctrain"]) == (locked and f"0.1.0 ({locked})")
    assert found == (f"hpctrain 0.1.0 ({new}) -> 0.1.0 ({old})",)
