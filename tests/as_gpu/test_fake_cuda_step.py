"""Whole training steps with all tensors on `cuda:0`: placement, and reads on the host.

Forward, backward and optimizer of the product's own engines run on fake tensors (see `fake_cuda`),
from samples to updated weights, with megatron-core's layers and the stub of TransformerEngine, FSDP
and DDP. What cannot be seen: numbers; kernels that torch does not have; sizes that depend on
numbers (experts: how many tokens each gets), hence no experts here. Groups have one rank, and what
collectives would write stays unset. transformers takes fake tensors for tracing, and then does not
look whether positions restart (masking_utils.py): `test_host_reads` counts that read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda_guard
import fake_cuda_steps
import pytest
import settings_sweep
from fresh_process import IMPORTS, FreshProcess
from trial_runs import MODULE_GPT, MODULE_LLAMA
from variants import varied

pytestmark = pytest.mark.skipif(
    fake_cuda_guard.compiler() is None, reason="needs a C++ compiler for torch's device guard"
)

FAMILIES = settings_sweep.FAMILIES
LOCAL = dict(transformer_impl="local")
FSDP = dict(engine="fsdp", shard_size=1, precision="bf16")
DDP = dict(engine="ddp", precision="bf16")
# A step reads in megatron-core: two checks for nan of the only bucket, and the gradient norm.
# BERT also sums its tokens. Nothing is read per micro-batch.
STEPS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt": (FAMILIES["gpt"], 3),
    "llama": (FAMILIES["llama"], 3),
    "bert": (FAMILIES["bert"], 4),
    "latent attention": (FAMILIES["latent attention"], 3),
    "prediction layer": (FAMILIES["prediction layer"], 3),
    "gpt with fsdp": ({**MODULE_GPT, **FSDP}, 0),
    "llama with fsdp": ({**MODULE_LLAMA, **FSDP}, 0),
    "gpt with ddp": ({**MODULE_GPT, **DDP}, 0),
    "llama with ddp": ({**MODULE_LLAMA, **DDP}, 0),
}
# The others are variants: other layers of the same families.
ALWAYS = ("gpt",)
# Without TransformerEngine the norm is computed by `local_multi_tensor_l2_norm`, which reads one
# number per parameter and brings the sum back (megatron/core/utils.py).
LOCAL_STEPS = {"gpt": 28, "llama": 20}
LOCAL_NORM = "utils.py local_multi_tensor_l2_norm"
# Samples before they are copied, and BERT's choice of tokens, which is drawn on the host.
_MASKS = ("engines/models/tasks.py apply", "engines/models/tasks.py <genexpr>")
SAMPLES = ("datasets/", *_MASKS)
# States of generators, which random.py compares.
ON_THE_HOST = (*SAMPLES, "tensor_parallel/random.py")
ON_THE_GPU = {"totals": ["cuda:0"], "weights": ["cuda:0"], "states": ["cuda:0"]}
# DDP's C++ code takes the sums from the group, which here computes them on the host: of the fake
# GPU, not of the product.
SUMS = {"ddp": ("aten::as_strided in elsewhere", "aten::copy_ to cuda:0 in elsewhere")}


@pytest.fixture(scope="module")
def gpu_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshProcess]:
    """A process with the fake GPU and the stub of TransformerEngine."""
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    fake_cuda_guard.build(library)
    process = FreshProcess(
        [Path(__file__).parents[1] / "stubs"],
        ["fake_cuda:install", *IMPORTS],
        **{fake_cuda_guard.VARIABLE: str(library)},
    )
    yield process
    process.close()


class Steps:
    """What is seen in steps of models with two layers, each looked at once."""

    def __init__(self, process: FreshProcess) -> None:
        self._process = process
        self._seen: dict[str, Any] = {}

    def seen(self, document: dict[str, Any], microbatches: int = 2) -> Any:
        size = document["micro_batch_size"] * document["data_parallel_size"]
        changed = {**document, "global_batch_size": microbatches * size}
        if "num_layers" in changed:
            changed |= dict(num_layers=2, pipeline_layer_split=[[2]])
        else:
            changed["model"] = {**changed["model"], "layers": 2}
        text = json.dumps(changed)
        if text not in self._seen:
            found = self._process.call(fake_cuda_steps.seen_in_a_step, document=text)
            self._seen[text] = found
        return self._seen[text]


@pytest.fixture(scope="module")
def steps(gpu_process: FreshProcess) -> Steps:
    return Steps(gpu_process)


def elsewhere(found: dict[str, int], *allowed: str) -> list[str]:
    return [name for name in found if not any(place in name for place in allowed)]


@pytest.mark.parametrize("name", varied(STEPS, *ALWAYS))
def test_all_tensors_of_a_step_are_on_the_gpu(name: str, steps: Steps) -> None:
    document, reads = STEPS[name]
    seen = steps.seen(document)
    assert seen["mixed"] == {}
    sums = SUMS.get(document["engine"], ())
    assert elsewhere(seen["on_the_host"], *ON_THE_HOST, *sums) == []
    assert elsewhere(seen["copies"], *SAMPLES, *sums) == []
    assert seen["copies"], "samples have been copied to the GPU"
    assert seen["devices"] == ON_THE_GPU
    assert sum(seen["reads"].values()) <= reads, seen["reads"]


@pytest.mark.parametrize("name", varied(("gpt", "llama with fsdp", "gpt with ddp"), "gpt"))
def test_a_microbatch_reads_nothing(name: str, steps: Steps) -> None:
    """More micro-batches add copies of samples, and no reads."""
    few, many = (steps.seen(STEPS[name][0], number) for number in (2, 4))
    assert many["reads"] == few["reads"]
    samples = [
        sum(number for place, number in one["copies"].items() if "datasets/" in place)
        for one in (few, many)
    ]
    assert samples == [8, 16], "four tensors each"


@pytest.mark.parametrize("name", LOCAL_STEPS)
def test_layers_of_megatron_core_are_on_the_gpu(name: str, steps: Steps) -> None:
    seen = steps.seen({**FAMILIES[name], **LOCAL})
    assert seen["mixed"] == {}
    assert elsewhere(seen["on_the_host"], *ON_THE_HOST, LOCAL_NORM) == []
    assert elsewhere(seen["copies"], *SAMPLES, LOCAL_NORM) == []
    assert seen["devices"] == ON_THE_GPU
    assert sum(seen["reads"].values()) <= 3 + LOCAL_STEPS[name], seen["reads"]


def test_what_is_misplaced_is_seen(gpu_process: FreshProcess) -> None:
    """The first two are right; of the others each would be slow or wrong on a GPU."""
    assert gpu_process.call(fake_cuda_steps.seen_in_examples) == [
        [],
        [],
        ["mixed"],
        ["mixed"],
        ["reads"],
        ["reads"],
        ["reads"],
        ["copies"],
        ["copies"],
        ["on_the_host"],
    ]
    assert gpu_process.call(fake_cuda_steps.mixing_raises) == "FakeTensorDeviceMismatchError"
