"""Settings of megatron-core as a GPU would see them, and options of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from trial_runs import GPT, LLAMA, ZERO

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.train_json import parse_train_config
from hpctrain.records.layout import RunLayout
from hpctrain.records.software import Library
from hpctrain.train import entry, software
from hpctrain.train.engines.megatron import assembly, engine, mesh, model, option_settings
from hpctrain.train.engines.megatron.core_versions.supported import current
from hpctrain.train.engines.megatron.model import _fusion_settings
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import read_launch
from hpctrain.train.stop import StopSignals

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


Row = tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]


def row(
    given: dict[str, Any],
    *,
    layout: dict[str, Any] | None = None,
    transformer: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> Row:
    """What is set on which shape and layout, and the fields of TransformerConfig (those that are
    given), DistributedDataParallelConfig and OptimizerConfig (none) that it changes."""
    changed = [given if transformer is None else transformer, ddp or {}, optimizer or {}]
    return layout or {}, {**(layout or {}), **given}, changed


def fp8(recipe: str, **more: Any) -> dict[str, Any]:
    return dict(fp8="e4m3" if recipe == "mxfp8" else "hybrid", fp8_recipe=recipe, **more)


RENEWED = dict(reuse_grad_buf_for_mxfp8_param_ag=True)
OPTIONS: dict[str, Row] = {
    "delayed": row(
        fp8("delayed"),
        transformer=dict(fp8="hybrid", fp8_amax_history_len=1024, fp8_amax_compute_algo="max"),
        optimizer=dict(fp8_recipe="delayed"),
    ),
    "tensorwise": row(fp8("tensorwise"), optimizer=dict(fp8_recipe="tensorwise")),
    "blockwise": row(fp8("blockwise"), optimizer=dict(fp8_recipe="blockwise")),
    "mxfp8, gathered": row(
        fp8("mxfp8", fp8_param=True),
        ddp=dict(fp8_param_gather=True, **RENEWED),
        optimizer=dict(fp8_recipe="mxfp8", **RENEWED),
    ),
    "tensorwise, gathered": row(
        fp8("tensorwise", fp8_param=True),
        ddp=dict(fp8_param_gather=True),
        optimizer=dict(fp8_recipe="tensorwise"),
    ),
    "fp4": row(dict(fp4="e2m1")),
    "gradients in bf16": row(
        dict(grad_reduce_in_fp32=False), transformer={}, ddp=dict(grad_reduce_in_fp32=False)
    ),
    "userbuffers": row(dict(tp_comm_overlap=True), layout=TP2),
    "fused loss": row(dict(cross_entropy_loss_fusion=True)),
    "deferred gradient": row(
        dict(defer_embedding_wgrad_compute=True),
        layout=PP2,
        transformer=dict(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=50),
    ),
    "some layers again": row(
        dict(recompute_granularity="full", recompute_num_layers=2),
        transformer=dict(
            recompute_granularity="full", recompute_method="block", recompute_num_layers=2
        ),
    ),
    "activations on the host": row(
        dict(cpu_offloading_num_layers=2),
        transformer=dict(cpu_offloading=True, cpu_offloading_num_layers=2),
    ),
    "graphs by megatron-core": row(
        dict(cuda_graph_impl="local"), layout=dict(transformer_impl="local")
    ),
    "graphs by TransformerEngine": row(
        dict(cuda_graph_impl="transformer_engine"),
        transformer=dict(cuda_graph_impl="transformer_engine", use_te_rng_tracker=True),
    ),
    "tokens by DeepEP": row(dict(moe_token_dispatcher_type="flex"), layout=MOE),
    "tokens by HybridEP": row(
        dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep"), layout=MOE
    ),
    "shared expert meanwhile": row(dict(moe_shared_expert_overlap=True), layout=MOE),
    "split experts": row(
        dict(expert_tensor_parallel_size=2),
        layout={**MOE, **TP2, "expert_tensor_parallel_size": 1},
    ),
}


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
    plain, given, expected = OPTIONS[name]
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
    for _, given, _ in OPTIONS.values():
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


# -----------------------------------------------------------------------------------------------
# Settings of megatron-core as a GPU would see them, where a reading found that runs would fail.
# docs/gpu.md lists each point with its test. TransformerEngine and Apex are facts here, no
# libraries.

PRESENT = Library(version="2.8.0")
LATENT = dict(
    LLAMA,
    multi_latent_attention=True,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
)


def fused(monkeypatch: pytest.MonkeyPatch, base: dict[str, Any], apex: Library) -> dict[str, Any]:
    """The fusions of a model with TransformerEngine on a GPU."""
    monkeypatch.setattr(software, "transformer_engine", lambda: PRESENT)
    monkeypatch.setattr(software, "apex_wgrad", lambda: apex)
    document = json.dumps(dict(base, transformer_impl="transformer_engine"))
    return _fusion_settings(parse_train_config(document), compiled=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [GPT, LLAMA, LATENT], ids=["gpt", "llama", "latent"])
def test_gradients_are_accumulated_by_apex_only_where_its_extension_imports(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core's output layer raises otherwise, with TransformerEngine or without."""
    for apex in (Library(), Library(error="ImportError: libcudart.so.12")):
        assert fused(monkeypatch, base, apex)["gradient_accumulation_fusion"] is False
    assert fused(monkeypatch, base, PRESENT)["gradient_accumulation_fusion"] is True


def test_rotary_positions_of_latent_attention_are_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """megatron-core fuses those of YaRN only, and refuses others (transformer_config.py)."""
    assert fused(monkeypatch, LATENT, PRESENT)["apply_rope_fusion"] is False
    assert fused(monkeypatch, LLAMA, PRESENT)["apply_rope_fusion"] is True


BROKEN = """\
import sys
sys.path.insert(0, sys.argv[1])
from hpctrain.train import megatron_on_cpu
megatron_on_cpu.install_triton()
from hpctrain.train.engines.megatron import fixes
fixes.install()
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as optimizer
for name in ("load_state_dict", "_set_main_param_and_optimizer_states"):
    print(name, getattr(optimizer, name).__module__)
"""


@pytest.mark.variant("test_rotary_positions_of_latent_attention_are_not_fused")
def test_a_library_that_is_installed_and_broken_keeps_no_correction_away(tmp_path: Path) -> None:
    """megatron-core then takes torch's AdamW, whose steps would be wrong after every resume.

    Of Apex only: megatron-core cannot be imported at all beside a TransformerEngine that cannot
    (tensor_parallel/random.py).
    """
    broken = tmp_path / "apex" / "optimizers"
    broken.mkdir(parents=True)
    (broken.parent / "__init__.py").write_text("")
    (broken / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BROKEN, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    modules = {name: module for name, module in lines[-2:]}
    assert len(modules) == 2, done.stderr[-2000:]
    assert all(module.startswith("hpctrain.") for module in modules.values()), modules


@pytest.mark.parametrize(("offloaded", "threads"), [(True, "12"), (False, "1")])
def test_an_optimizer_on_the_host_computes_with_the_cpus_of_its_rank(
    offloaded: bool, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = dict(ZERO, zero_stage=2, accelerator="cuda")
    base |= dict(offload_optimizer="cpu") if offloaded else {}
    config = parse_train_config(json.dumps(base))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(entry, "place_rank", lambda local_rank: "near")
    for name in ("OMP_NUM_THREADS", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    launch = read_launch({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    entry._prepare_process(Job(config, launch, RunLayout(tmp_path), StopSignals()))
    assert os.environ["OMP_NUM_THREADS"] == threads
