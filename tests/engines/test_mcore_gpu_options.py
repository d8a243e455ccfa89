"""Options of a GPU reach megatron-core's configuration, and nothing is set without them.

The functions see a GPU with TransformerEngine: `on_cpu` and the facts about software are patched,
because neither is here. What TransformerEngine does with the fields is tested where it is
(`make gpu`).
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from trial_runs import GPT, LLAMA

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.records.software import Library
from hpctrain.train import software
from hpctrain.train.engines.megatron import assembly, engine, mesh, model, option_settings
from hpctrain.train.engines.megatron.core_versions.supported import current

MOE = dict(
    num_moe_experts=4,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=32,
    add_bias_linear=False,
)
PP2 = dict(pipeline_model_parallel_size=2, pipeline_layer_split=((2,), (2,)))
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have a GPU, TransformerEngine 2.9 and Apex."""
    for module in (model, option_settings):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    found = Library(version="2.9.0")
    monkeypatch.setattr(software, "transformer_engine", lambda: found)
    monkeypatch.setattr(software, "apex_wgrad", lambda: found)


def config(**changes: Any) -> MegatronConfig:
    return MegatronConfig(**{**GPT, "precision": "bf16", "accelerator": "cuda", **changes})


def settings(changes: dict[str, Any]) -> tuple[Any, Any, Any]:
    made = config(**changes)
    return (
        model.transformer_settings(made),
        model.ddp_settings(made),
        engine.optimizer_settings(made),
    )


# What is set, and the fields of TransformerConfig, DistributedDataParallelConfig and
# OptimizerConfig that it changes.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "delayed": (
        dict(fp8="hybrid", fp8_recipe="delayed"),
        dict(fp8="hybrid",
            fp8_amax_history_len=1024,
             fp8_amax_compute_algo="max"),
        {},
        dict(fp8_recipe="delayed"),
    ),
    "tensorwise": (
        dict(fp8="hybrid", fp8_recipe="tensorwise"),
        dict(fp8="hybrid", fp8_recipe="tensorwise"),
        {},
        dict(fp8_recipe="tensorwise"),
    ),
    "blockwise": (
        dict(fp8="hybrid", fp8_recipe="blockwise"),
        dict(fp8="hybrid", fp8_recipe="blockwise"),
        {},
        dict(fp8_recipe="blockwise"),
    ),
    "mxfp8, gathered": (
        dict(fp8="e4m3", fp8_recipe="mxfp8", fp8_param=True),
        dict(fp8="e4m3", fp8_recipe="mxfp8", fp8_param=True),
        dict(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True),
        dict(fp8_recipe="mxfp8", reuse_grad_buf_for_mxfp8_param_ag=True),
    ),
    "tensorwise, gathered": (
        dict(fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True),
        dict(fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True),
        dict(fp8_param_gather=True),
        dict(fp8_recipe="tensorwise"),
    ),
    "fp4": (dict(fp4="e2m1"), dict(fp4="e2m1"), {}, {}),
    "gradients in bf16": (
        dict(grad_reduce_in_fp32=False),
        {},
        dict(grad_reduce_in_fp32=False),
        {},
    ),
    "userbuffers": (
        dict(tp_comm_overlap=True, **TP2),
        dict(tp_comm_overlap=True),
        {},
        {},
    ),
    "fused loss": (
        dict(cross_entropy_loss_fusion=True), dict(cross_entropy_loss_fusion=True), {}, {}
    ),
    "deferred gradient": (
        dict(defer_embedding_wgrad_compute=True, **PP2),
        dict(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=50),
        {},
        {},
    ),
    "some layers again": (
        dict(recompute_granularity="full", recompute_num_layers=2),
        dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
        {},
        {},
    ),
    "activations on the host": (
        dict(cpu_offloading_num_layers=2),
        dict(cpu_offloading=True, cpu_offloading_num_layers=2),
        {},
        {},
    ),
    "graphs by megatron-core": (
        dict(cuda_graph_impl="local", transformer_impl="local"),
        dict(cuda_graph_impl="local"),
        {},
        {},
    ),
    "graphs by TransformerEngine": (
        dict(cuda_graph_impl="transformer_engine"),
        dict(cuda_graph_impl="transformer_engine", use_te_rng_tracker=True),
        {},
        {},
    ),
    "tokens by DeepEP": (
        dict(moe_token_dispatcher_type="flex", **MOE),
        dict(moe_token_dispatcher_type="flex"),
        {},
        {},
    ),
    "tokens by HybridEP": (
        dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep", **MOE),
        dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep"),
        {},
        {},
    ),
    "shared expert meanwhile": (
        dict(moe_shared_expert_overlap=True, **MOE), dict(moe_shared_expert_overlap=True), {}, {}
    ),
    "split experts": (
        dict(expert_tensor_parallel_size=2, **MOE, **TP2),
        dict(expert_tensor_parallel_size=2),
        {},
        {},
    ),
}  # fmt: skip
# Fields of the shape and layout in the rows above, which no option sets.
_LAYOUT = {
    *MOE, *PP2, *TP2, "expert_tensor_parallel_size", "transformer_impl",
    "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout",
}  # fmt: skip


def _changed(plain: Any, made: Any) -> dict[str, Any]:
    """Compare two configurations but for initialisers, layouts, and what follows for inference."""
    left, right = asdict(plain), asdict(made)
    names = (
        name
        for name in right
        if not name.endswith("init_method") and not name.startswith("inference_")
    )
    return {name: right[name] for name in names if left[name] != right[name]}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_its_fields_and_no_others(name: str) -> None:
    given, *expected = OPTIONS[name]
    # the same shape and layout without the option
    plain = {field: given[field] for field in _LAYOUT & given.keys()}
    plain.pop("expert_tensor_parallel_size", None)
    if name == "split experts":
        plain |= dict(expert_tensor_parallel_size=1)
    found = [_changed(*pair) for pair in zip(settings(plain), settings(given), strict=True)]
    assert found == expected


@pytest.mark.usefixtures("gpu")
def test_fused_permutation_reaches_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core looks for the kernels of TransformerEngine, which are not here."""
    from megatron.core.transformer.moe import moe_utils

    for name in ("permute", "permute_with_probs", "sort_chunks_by_index", "unpermute"):
        monkeypatch.setattr(moe_utils, f"fused_{name}", object(), raising=False)
    monkeypatch.setattr(moe_utils, "fused_sort_chunks_by_index_with_probs", object(), raising=False)
    assert model.transformer_settings(config(moe_permute_fusion=True, **MOE)).moe_permute_fusion
    assert not model.transformer_settings(config(**MOE)).moe_permute_fusion


@pytest.mark.usefixtures("gpu")
def test_experts_are_not_captured() -> None:
    """The host reads how many tokens each expert gets."""
    made = config(cuda_graph_impl="transformer_engine", **MOE)
    field = current().graphed_modules
    (module,) = getattr(model.transformer_settings(made), field)
    assert module.name == "attn"
    whole_layers = model.transformer_settings(config(cuda_graph_impl="local"))
    assert getattr(whole_layers, field) == []


@pytest.mark.usefixtures("gpu")
def test_bert_divides_its_gradients_itself() -> None:
    """distributed_data_parallel.py refuses an average with calculate_per_token_loss."""
    assert not model.ddp_settings(config(model_type="bert")).average_in_collective
    assert model.ddp_settings(config()).average_in_collective


def test_gloo_has_no_average() -> None:
    made = config(grad_reduce_in_fp32=False)
    assert not model.ddp_settings(made).average_in_collective
    assert not model.ddp_settings(made).grad_reduce_in_fp32


def test_what_needs_a_gpu_is_left_out_of_a_plan_that_is_verified_without() -> None:
    for given, *_ in OPTIONS.values():
        made = config(**given)
        plain = option_settings.without_gpu_options(made)
        kept = {"grad_reduce_in_fp32", "cross_entropy_loss_fusion", "recompute_num_layers"}
        assert isinstance(
            model.transformer_settings(plain.model_copy(update=dict(transformer_impl="local"))),
            TransformerConfig,
        )
        assert {name: getattr(plain, name) for name in kept} == {
            name: getattr(made, name) for name in kept
        }


class _Recorder:
    """Stands in for TransformerEngine's module with userbuffers, which needs a GPU."""

    class UserBufferQuantizationMode:
        NONE, FP8 = "none", "fp8"

    def __init__(self, *, mpi: bool = False, multicast: bool = True) -> None:
        self.mpi, self.multicast = mpi, multicast
        self.opened: list[dict[str, Any]] = []

    def ubuf_built_with_mpi(self) -> bool:
        return self.mpi

    def device_supports_multicast(self) -> bool:
        return self.multicast

    def initialize_ub(self, **arguments: Any) -> None:
        self.opened.append(arguments)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(version: str, **facts: bool) -> _Recorder:
        import sys
        from types import ModuleType

        recorder = _Recorder(**facts)
        names = ("transformer_engine", "transformer_engine.pytorch",
                 "transformer_engine.pytorch.module")  # fmt: skip
        for name in names:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[names[-1]].base = recorder  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "transformer_engine_torch", recorder)  # type: ignore[arg-type]
        found = Library(version=version)
        monkeypatch.setattr(software, "transformer_engine", lambda: found)
        monkeypatch.delenv("UB_SKIPMC", raising=False)
        return recorder

    return install


def test_userbuffers_have_the_shape_of_a_layers_input(transformer_engine: Any) -> None:
    recorder = transformer_engine("2.9.0")
    assembly.open_userbuffers(config())
    assert recorder.opened == [], "they were not asked for"
    made = config(tp_comm_overlap=True, fp8="hybrid", micro_batch_size=4, **TP2)
    assembly.open_userbuffers(made)
    assert recorder.opened == [
        dict(
            shape=[32 * 4, 64],
            tp_size=2,
            ub_cfgs={},
            bootstrap_backend="nccl",
            quantization_modes=["fp8"],
        )
    ]


def test_older_userbuffers_take_one_format(
    transformer_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "UB_SKIPMC", "")  # restored by monkeypatch
    monkeypatch.delenv("UB_SKIPMC")
    recorder = transformer_engine("2.4.0", multicast=False)
    assembly.open_userbuffers(config(tp_comm_overlap=True, **TP2))
    assert recorder.opened[0]["use_fp8"] is False
    assert os.environ["UB_SKIPMC"] == "1", "GPUs without multicast exchange through CUDA IPC"


def test_userbuffers_that_want_mpi_are_refused(transformer_engine: Any) -> None:
    transformer_engine("2.9.0", mpi=True)
    with pytest.raises(Exception, match="NVTE_UB_WITH_MPI"):
        assembly.open_userbuffers(config(tp_comm_overlap=True, **TP2))


class _Chunk:
    """A data-parallel chunk whose hooks gather weights; writes down what is done to it."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def disable_forward_pre_hook(self, *, param_sync: bool) -> None:
        assert not param_sync, "weights are gathered already"
        self.done.append("hooks off")

    def enable_forward_pre_hook(self) -> None:
        self.done.append("hooks on")


@pytest.mark.parametrize("overlaps", [True, False])
def test_graphs_are_captured_once_after_the_steps_that_warm_up(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture itself needs a GPU; in its place is what megatron-core's helper is asked."""
    from megatron.core import num_microbatches_calculator
    from megatron.core.transformer import cuda_graphs as library

    done: list[str] = []

    class Helper:
        def __init__(self, chunks: Any, *given: Any) -> None:
            assert given[1:3] == (32, 2), "sequence and micro-batch"
            assert num_microbatches_calculator.get_num_microbatches() == 4

        def create_cudagraphs(self) -> None:
            done.append("captured")

        def cuda_graph_set_manual_hooks(self) -> None:
            done.append("hooks in graphs")

    monkeypatch.setattr(library, "TECudaGraphHelper", Helper)
    made = config(cuda_graph_impl="transformer_engine", overlap_param_gather=overlaps)
    chunks = model.ModelChunks(None, [_Chunk(done)], [])  # type: ignore[arg-type]
    graphs = engine.LayerGraphs(made, chunks, object())
    for step in range(6):
        graphs.before_step()
        assert ("captured" in done) is (step >= option_settings.CUDA_GRAPH_WARMUP_STEPS)
    expected = ["hooks off", "captured", "hooks on", "hooks in graphs"]
    assert done == (expected if overlaps else ["captured"])


@pytest.mark.parametrize("kind", ["none", "local", "transformer_engine"])
def test_only_runs_with_graphs_of_transformer_engine_ask_for_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer import cuda_graphs as library

    asked: list[str] = []
    monkeypatch.setattr(library, "TECudaGraphHelper", lambda *given: asked.append(kind))
    chunks = model.ModelChunks(None, [], [])  # type: ignore[arg-type]
    engine.LayerGraphs(config(cuda_graph_impl=kind), chunks, None)
    assert asked == (["transformer_engine"] if kind == "transformer_engine" else [])


def test_graphs_need_nccl_without_registered_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    engine.prepare_environment(config())
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1", "graphs were not asked for"
    engine.prepare_environment(config(cuda_graph_impl="local"))
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"


def test_generators_of_graphs_are_stored_as_tensors() -> None:
    """A run may begin or cease to use graphs at a resume."""
    generator = torch.Generator()
    generator.manual_seed(7)
    stored = mesh._converted({"a": generator}, to_graphable=False)
    assert torch.equal(stored["a"], generator.get_state())
    assert mesh._converted(stored, to_graphable=False)["a"] is stored["a"]


def test_a_llama_has_no_option_by_itself() -> None:
    made = MegatronConfig(**LLAMA)
    assert option_settings.number_format_settings(made) == {}
    assert option_settings.message_settings(made) == {}
    assert option_settings.offload_settings(made) == {}
    assert option_settings.graph_settings(made) == {}
    assert option_settings.optimizer_format_settings(made) == {}
