"""What ranks find of libraries and GPUs, how it is judged, and what of it stands in the lock."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_train_preflight import FLEX, FP8, MOE, PARTS, SP, config

from hpctrain.base.errors import InvalidInputError
from hpctrain.engines.training import TrainConfig
from hpctrain.records.kept_code import archive_name, use_archive
from hpctrain.records.layout import RunLayout
from hpctrain.records.software import (
    Library,
    SoftwareFacts,
    SoftwareLock,
    changes,
    of_newest_launch,
    read_lock,
    read_software,
    write_software,
)
from hpctrain.supervise.srun_launch import image_identity
from hpctrain.train import software, software_agreement
from hpctrain.train.faults import RefusedElsewhereError
from hpctrain.train.job import Job
from hpctrain.train.software import (
    LibraryProblem,
    checkout_state,
    found_software,
    installed_packages,
    newest_cuda_of_driver,
)
from hpctrain.train.software_agreement import (
    RankSoftware,
    Refusal,
    judge,
    records_of,
    refuse,
    unequal_nodes,
)

# -- What ranks find is judged before any process group exists: pure, for any number of nodes ----


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
RUN: dict[str, Any] = dict(
    accelerator="cuda",
    world_size=4,
    compiles_kernels=True,
    needs_transformer_engine="cp 2",
    software_needs=(),
)
# of the settings of a run, and hpctrain of its supervisor
NEEDS = (cast(TrainConfig, SimpleNamespace(**RUN)), "0.1.0")


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
    assert list(judge(ranks(n0=GOOD, n1=GOOD), *NEEDS)) == []


def test_what_an_engine_finds_wrong_is_refused_on_its_nodes() -> None:
    """For example a private name that one node's megatron-core lacks."""
    problem = LibraryProblem("megatron-core lacks a name", "install another")
    several = [
        rank.model_copy(update={"problems": (problem,)}) if rank.node == "n1" else rank
        for rank in ranks(n0=GOOD, n1=GOOD)
    ]
    (refusal,) = judge(several, *NEEDS)
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
    (refusal,) = judge(ranks(n0=facts, n1=facts), *NEEDS)
    assert words in refusal.message and refusal.hint
    assert refusal.everywhere and refusal.nodes == ("n0", "n1")
    for node in ("n0", "n1"):
        with pytest.raises(InvalidInputError) as caught:
            refuse([refusal], node)
        assert not caught.value.node_dependent


def test_a_problem_of_one_node_names_it_on_all_ranks() -> None:
    facts = changed(gpus=(), gpu_error="No CUDA GPUs are available")
    found = list(judge(ranks(n0=GOOD, n1=facts, n2=GOOD), *NEEDS))
    (refusal,) = found
    assert refusal.nodes == ("n1",) and not refusal.everywhere
    with pytest.raises(InvalidInputError, match="on n1: torch 2") as caught:
        refuse(found, "n1")
    assert caught.value.node_dependent
    with pytest.raises(RefusedElsewhereError, match="on n1: "):
        refuse(found, "n2")


def test_a_lost_gpu_is_found_by_what_ranks_would_share() -> None:
    found = list(judge(ranks(n0=GOOD, n1=changed(gpus=("NVIDIA H100",))), *NEEDS))
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
    assert list(judge(bound, *NEEDS)) == []


def test_the_odd_version_is_the_one_of_fewer_nodes() -> None:
    odd = changed(megatron_core="0.17.0")
    (refusal,) = judge(ranks(n0=odd, n1=GOOD, n2=GOOD), *NEEDS)
    assert refusal.nodes == ("n0",)
    assert refusal.message == "megatron-core is 0.17.0 there, and 0.16.1 on the other nodes"


@pytest.mark.parametrize("facts", [{"nccl": "2.27.5"}, {"code": "0123456789ab"}])
def test_messages_and_code_of_hpctrain_are_the_same_on_all_nodes(facts: dict[str, str]) -> None:
    found = ranks(n0=GOOD, n1=changed(**facts), n2=GOOD)
    (refusal,) = judge(found, *NEEDS)
    assert refusal.nodes == ("n1",) and list(unequal_nodes(found)) == []


def test_nodes_may_be_upgraded_one_after_the_other() -> None:
    found = ranks(n0=GOOD, n1=changed(driver="590.1"), n2=GOOD)
    assert list(judge(found, *NEEDS)) == []
    message = "driver is 590.1 there, and 580.65.06 on the other nodes: n1"
    assert list(unequal_nodes(found)) == [message]


def test_without_gpus_nothing_about_them_is_needed() -> None:
    on_cpus = {**RUN, "accelerator": "cpu", "needs_transformer_engine": None}
    facts = NO_CUDA.model_copy(
        update=dict(transformer_engine=Library(), triton=Library(), compiler=None)
    )
    assert list(judge(ranks(n0=facts), cast(TrainConfig, SimpleNamespace(**on_cpus)))) == []


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


# -- What each option needs of libraries and GPUs, and the refusal where a rank lacks it ---------


FACTS = GOOD.model_copy(update=dict(capabilities=("9.0", "9.0"), apex_wgrad=Library(version="1")))


def with_facts(**fields: Any) -> SoftwareFacts:
    return FACTS.model_copy(update=fields)


def te(version: str) -> SoftwareFacts:
    return with_facts(transformer_engine=Library(version=version))


MISSING = with_facts(transformer_engine=Library())
AMPERE = with_facts(gpus=("NVIDIA A100",) * 2, capabilities=("8.0", "8.0"))
BLACKWELL = with_facts(gpus=("NVIDIA B200",) * 2, capabilities=("10.0", "10.0"))
MXFP8 = {**FP8, "fp8_recipe": "mxfp8", "fp8": "e4m3"}
EP2 = dict(expert_model_parallel_size=2, **FLEX, **MOE)
GRAPHS = dict(cuda_graph_impl="transformer_engine")

REFUSED: list[tuple[dict[str, Any], SoftwareFacts, str]] = [
    (FP8, MISSING, "`fp8_recipe: tensorwise` needs TransformerEngine 2.2: not installed"),
    (FP8, te("2.1.0+cu12"), "needs TransformerEngine 2.2: 2.1.0+cu12"),
    (FP8, AMPERE, "needs compute capability 8.9: NVIDIA A100 has 8.0"),
    ({**FP8, "fp8_recipe": "blockwise"}, with_facts(cuda_build="12.8"), "needs CUDA 12.9: torch"),
    ({**FP8, "fp8_recipe": "blockwise"}, te("2.2"), "needs TransformerEngine 2.3"),
    (MXFP8, FACTS, "needs compute capability 10.0 or more, below 12.0: NVIDIA H100 has 9.0"),
    (
        MXFP8,
        with_facts(gpus=("RTX 5090",) * 2, capabilities=("12.0",) * 2),
        "below 12.0: RTX 5090 has 12.0",
    ),
    (dict(fp4="e2m1", precision="bf16"), FACTS, "`precision: fp4` needs compute capability 10.0"),
    (
        dict(fp4="e2m1", precision="bf16"),
        BLACKWELL.model_copy(update=dict(transformer_engine=Library(version="2.6.0"))),
        "`precision: fp4` needs TransformerEngine 2.7: 2.6.0",
    ),
    (dict(tp_comm_overlap=True, **SP), te("1.8.0"), "`tp_comm_overlap` needs TransformerEngine"),
    (
        dict(defer_embedding_wgrad_compute=True),
        with_facts(apex_wgrad=Library(error="ImportError: libc10.so")),
        "`defer_embedding_wgrad_compute` needs Apex's fused_weight_gradient_mlp_cuda: "
        "cannot be imported (ImportError: libc10.so)",
    ),
    (dict(cpu_offloading_num_layers=1), MISSING, "`activation_offload_layers` needs"),
    (GRAPHS, MISSING, "`cuda_graph_impl: transformer_engine` needs TransformerEngine"),
    (
        dict(cuda_graph_impl="local"),
        with_facts(gpus=(), capabilities=(), cuda_build="13.0"),
        "`cuda_graph_impl: local` needs GPUs",
    ),
    (dict(moe_permute_fusion=True, **MOE), te("2.0.0"), "needs TransformerEngine 2.1: 2.0.0"),
    (EP2, FACTS, "`moe_flex_dispatcher_backend: deepep` needs DeepEP: not installed"),
    (
        {**EP2, "moe_flex_dispatcher_backend": "hybridep"},
        with_facts(hybrid_ep=Library(error="deep_ep 1.2 has no HybridEPBuffer")),
        "needs HybridEP of DeepEP: cannot be imported (deep_ep 1.2 has no HybridEPBuffer)",
    ),
    (
        {**PARTS, "recompute_modules": ("layernorm",)},
        MISSING,
        "`recompute_modules: [layernorm]` needs TransformerEngine: not installed",
    ),
]


@pytest.mark.parametrize(("changes", "facts", "words"), REFUSED)
def test_an_option_without_what_it_needs_is_refused_on_every_rank(
    changes: dict[str, Any], facts: SoftwareFacts, words: str
) -> None:
    # `cpu`: the missing GPU itself is another refusal
    (refusal,) = judge(ranks(n0=facts, n1=facts), config(accelerator="cpu", **changes))
    assert words in refusal.message and refusal.everywhere and refusal.hint


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (FP8, FACTS),
        (FP8, te("2.2.0.dev0+39c0e70")),
        ({**FP8, "fp8_recipe": "delayed"}, te("1.13.0")),
        ({**FP8, "fp8_recipe": "blockwise"}, FACTS),
        (MXFP8, BLACKWELL),
        (dict(fp4="e2m1", precision="bf16"), BLACKWELL),
        (dict(tp_comm_overlap=True, **SP), FACTS),
        (dict(defer_embedding_wgrad_compute=True), FACTS),
        (EP2, with_facts(deep_ep=Library(version="1.2.1"))),
        (GRAPHS, FACTS),
    ],
)
def test_an_option_with_what_it_needs_is_accepted(
    changes: dict[str, Any], facts: SoftwareFacts
) -> None:
    assert list(judge(ranks(n0=facts), config(accelerator="cpu", **changes))) == []


def test_a_single_node_that_lacks_it_is_named() -> None:
    (refusal, *_) = judge(ranks(n0=FACTS, n1=AMPERE), config(accelerator="cpu", **FP8))
    assert refusal.nodes == ("n1",) and not refusal.everywhere


@pytest.mark.parametrize(
    ("version", "least", "enough"),
    [
        ("2.7.0.dev0", (2, 7), True),
        ("2.10.1+cu13", (2, 9), True),
        ("2.6.9", (2, 7), False),
        ("unknown version", (1, 0), False),
    ],
)
def test_versions_are_numbers(version: str, least: tuple[int, int], enough: bool) -> None:
    assert Library(version=version).is_at_least(least) is enough


def test_a_missing_library_is_no_version() -> None:
    assert not Library().is_at_least((0, 1))


# -- What a launch trains with, by name: packages, checkout, image; and what has changed ---------


def git(checkout: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    argv = ["git", "-C", str(checkout), *identity, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = tmp_path / "Megatron-LM"
    (directory / "megatron/core").mkdir(parents=True)
    (directory / "megatron/core/model.py").write_text("layers = 1\n")
    (directory / "tests").mkdir()
    git(directory, "init", "-q")
    git(directory, "add", ".")
    git(directory, "commit", "-qm", "first")
    return directory


def test_a_checkout_is_its_commit_and_its_python_files(checkout: Path) -> None:
    clean = checkout_state(checkout)
    assert clean.startswith(git(checkout, "rev-parse", "HEAD")[:12])
    (checkout / "tests/test_model.py").write_text("1\n")
    (checkout / "notes.txt").write_text("1\n")
    assert checkout_state(checkout) == clean, "these do not train"
    git(checkout, "pack-refs", "--all")
    assert checkout_state(checkout) == clean
    (checkout / "megatron/core/model.py").write_text("layers = 2\n")
    changed = checkout_state(checkout)
    assert changed != clean and changed.split()[0] == clean.split()[0]
    git(checkout, "checkout", "-q", "--detach")
    assert checkout_state(checkout) == changed


def test_a_directory_without_git_is_its_files(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".git").rename(tmp_path / "git")
    assert checkout_state(checkout).startswith("files ")


def test_packages_are_named_as_installers_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Foo_Bar-1.2.dist-info", "egg-3.0-py3.11.egg-info", "hpctrain-9.dist-info", "x"):
        (tmp_path / "site" / name).mkdir(parents=True)
    (tmp_path / "late" / "foo_bar-7.dist-info").mkdir(parents=True)
    paths = [str(tmp_path / name) for name in ("site", "late", "missing")]
    monkeypatch.setattr(sys, "path", paths)
    assert installed_packages() == {"egg": "3.0", "foo-bar": "1.2"}


def test_everything_has_a_name(checkout: Path) -> None:
    facts = GOOD.model_copy(update={"code": "0123456789ab"})
    found = found_software(facts, 3, str(checkout), {"HPCTRAIN_IMAGE": "train.sif (1a2b)"})
    assert found.epoch == 3 and found.parts["hpctrain"] == "0.1.0 (0123456789ab)"
    assert found.parts["image"] == "train.sif (1a2b)" and found.parts["driver"] == "580.65.06"
    assert found.parts["NCCL"] == "2.28.3" and found.parts["checkout"] == checkout_state(checkout)
    assert "Apex" not in found.parts, "it is not installed"


def test_changes_are_listed_and_counted() -> None:
    old = SoftwareLock(epoch=1, parts={"torch": "2.13.0", "driver": "580"}, packages={"a": "1"})
    new = SoftwareLock(epoch=2, parts={"torch": "2.14.0", "Apex": "1"}, packages={"a": "1"})
    assert changes(old, old) == ()
    assert changes(old, new) == (
        "torch 2.13.0 -> 2.14.0",
        "driver 580 -> none",
        "Apex none -> 1",
    )
    many = new.model_copy(update={"packages": {f"p{n:02}": "1" for n in range(20)}})
    assert changes(new, many)[-1] == "13 more packages", "8 of 20 new ones and one lost are told"


def test_an_image_is_its_size_its_head_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "train.sif"
    image.write_bytes(b"head" + bytes(3 * 2**20) + b"tail")
    monkeypatch.setenv("IMAGES", str(tmp_path))
    found = image_identity("$IMAGES/train.sif")
    assert found == image_identity(str(image)) and found.startswith("train.sif (")
    image.write_bytes(b"head" + bytes(3 * 2**20) + b"tai1")
    assert image_identity(str(image)) != found
    reference = "docker://nvcr.io/nvidia/pytorch:25.01-py3"
    assert image_identity(reference) == reference and image_identity(str(tmp_path)) == str(tmp_path)


# -- Which CUDA a driver supports. There is no GPU here: libcuda is a stand-in with its call -----


class Driver:
    """The call of libcuda, by its C signature; `code` is CUresult."""

    def __init__(self, number: int, code: int = 0) -> None:
        self.number, self.code = number, code

    def cuDriverGetVersion(self, place: Any) -> int:
        ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = self.number
        return self.code


def test_the_number_of_the_driver_is_a_version() -> None:
    assert newest_cuda_of_driver(Driver(13000)) == "13.0"
    assert newest_cuda_of_driver(Driver(12080)) == "12.8"


def test_without_an_answer_nothing_is_known() -> None:
    for library in (Driver(0), Driver(13000, code=100), object()):
        assert newest_cuda_of_driver(library) is None


def test_a_torch_for_cuda_is_asked_for_nothing_that_a_release_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Private functions of torch come and go: 2.11.0 for CUDA 13.0 has none for the driver."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(software, "_gpu_error", lambda: "no driver")
    facts = software.collect.__wrapped__()
    assert (facts.cuda_build, facts.nccl) == ("13.0", "2.28.9")
