"""What engines cannot do together, or would not read, is refused where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.plan.abilities.trainable import untrainable_fields
from hpctrain.spec.engines.megatron_lm import FIELD_OF, KEPT_BACK, refusal
from hpctrain.spec.loader import load_run_spec

MODEL = "model: {layers: 4, hidden: 128, heads: 4, vocab: 1024, seq: 128}"
EXPERTS = MODEL.replace("}", ", moe: {experts: 8, top_k: 2, ffn: 64}}")
SHARED = EXPERTS.replace("ffn: 64}", "ffn: 64, shared_ffn: 64}, bias: false")
OPTIMIZER = "optimizer: {lr: 1e-3}"
OWN = "engine: {{megatron: {{{}}}}}\n"
DEEPSPEED = "engine: {name: deepspeed}\n"
CHECKOUT = "checkout: /opt/Megatron-LM"
ENGINE = f"engine: {{name: megatron-lm, {CHECKOUT}"


def own(*settings: str) -> str:
    return OWN.format(", ".join(settings))


# (a line of VALID, what replaces it, lines at the end, the problem)
WRONG = [
    ("", "", own("fp8_recipe: delayed"),
     "8:33: `engine.megatron.fp8_recipe`: fp8_recipe scales numbers of `precision: fp8`, which is "
     "bf16 | set `precision: fp8`, or remove it"),
    ("", "", "precision: fp32\n" + own("fp8_param_gather: true"),
     "9:39: `engine.megatron.fp8_param_gather`: weights are kept in 8 bits with `precision: fp8` "
     "only, not with fp32 | set `precision: fp8`, or remove it"),
    (OPTIMIZER, "optimizer: {lr: 1e-3, zero: 0}",
     "precision: fp8\n" + own("fp8_param_gather: true"),
     "9:39: `engine.megatron.fp8_param_gather`: weights are gathered in 8 bits by the distributed "
     "optimizer, which is off | set `optimizer.zero: 1`, or remove it"),
    (OPTIMIZER, "optimizer: {lr: 1e-3, offload: cpu}",
     "precision: fp8\n" + own("fp8_param_gather: true"),
     "9:39: `engine.megatron.fp8_param_gather`: with an offloaded optimizer weights are gathered "
     "in 8 bits by delayed scaling | set `fp8_recipe: delayed`, or remove the offload"),
    ("", "", "precision: fp8\nengine: {implementation: local}\n",
     "8:12: `precision`: fp8 needs the layers of TransformerEngine, not local ones"
     " | set `engine.implementation: transformer_engine`, or `precision: bf16`"),
    ("", "", "precision: fp8\nrecompute_modules: [layernorm]\n" + own("fp8_recipe: delayed"),
     "9:20: `recompute_modules`: layernorm cannot be computed again with delayed scaling"
     " | remove it, or set `fp8_recipe: tensorwise`"),
    ("", "", "precision: fp32\n" + own("grad_reduce_in_fp32: false"),
     "9:42: `engine.megatron.grad_reduce_in_fp32`: gradients are as wide as weights: with "
     "`precision: fp32` this changes nothing | remove it"),
    ("", "", "recompute: selective\nrecompute_layers: 2\n",
     "9:19: `recompute_layers`: only `recompute: full` counts layers, not selective"
     " | set `recompute: full`, or remove it"),
    ("", "", "recompute: full\n" + own("cuda_graph_impl: local"),
     "9:38: `engine.megatron.cuda_graph_impl`: graphs of layers exclude `recompute: full`"
     " | set `recompute: selective` or `none`, or remove it"),
    ("", "", "recompute: full\nactivation_offload_layers: 2\n",
     "9:28: `activation_offload_layers`: megatron-core offloads activations or computes them again "
     "(full) | set `recompute: none`, or remove it"),
    ("", "", "parallel: {pp: 2}\nactivation_offload_layers: 2\n",
     "9:28: `activation_offload_layers`: megatron-core offloads activations without a pipeline "
     "only, not with pp 2 | set `parallel.pp: 1`, or remove it"),
    ("", "", "activation_offload_layers: 4\n",
     "8:28: `activation_offload_layers`: fewer than the model's 4 layers can be offloaded, not 4"
     " | set 3 at most"),
    ("", "", "activation_offload_layers: 2\nengine: {implementation: local}\n",
     "8:28: `activation_offload_layers`: activations are offloaded by TransformerEngine, and "
     "`implementation` is local | set `engine.implementation: transformer_engine`"),
    ("", "", "activation_offload_layers: 2\n" + own("cuda_graph_impl: local"),
     "9:38: `engine.megatron.cuda_graph_impl`: graphs of layers exclude offloaded activations"
     " | remove one of the two"),
    ("", "", "parallel: {pp: 2}\n" + own("tp_comm_overlap: true"),
     "9:38: `engine.megatron.tp_comm_overlap`: this hides messages of sequence parallelism over "
     "tp: tp is 1 | remove it, or set `parallel.tp` above 1 with sequence_parallel"),
    ("", "", "parallel: {tp: 2, sequence_parallel: false}\n" + own("tp_comm_overlap: true"),
     "9:38: `engine.megatron.tp_comm_overlap`: this hides messages of sequence parallelism over "
     "tp: sequence_parallel is off | remove it, or set `parallel.tp` above 1 with "
     "sequence_parallel"),
    ("", "", "parallel: {tp: 2}\n" + own("defer_embedding_wgrad_compute: true"),
     "9:52: `engine.megatron.defer_embedding_wgrad_compute`: without a pipeline there is no gap to "
     "compute the weight gradient in | remove it, or set `parallel.pp` above 1"),
    (MODEL, MODEL.replace("}", ", family: bert}"), own("defer_embedding_wgrad_compute: true"),
     "8:52: `engine.megatron.defer_embedding_wgrad_compute`: megatron-core's BERT computes the "
     "output layer's weight gradient at once | remove it"),
    ("", "", own("moe_token_dispatcher_type: flex"),
     "8:48: `engine.megatron.moe_token_dispatcher_type`: this is for experts, and the model has "
     "none | remove it, or give `model.moe`"),
    ("", "", own("moe_permute_fusion: true"),
     "8:41: `engine.megatron.moe_permute_fusion`: this is for experts, and the model has none"
     " | remove it, or give `model.moe`"),
    (MODEL, EXPERTS, own("moe_shared_expert_overlap: true"),
     "8:48: `engine.megatron.moe_shared_expert_overlap`: the model has no shared expert"
     " | remove it, or give `model.moe.shared_ffn`"),
    (MODEL, SHARED, own("moe_shared_expert_overlap: true", "moe_token_dispatcher_type: flex"),
     "8:48: `engine.megatron.moe_shared_expert_overlap`: the shared expert overlaps with the "
     "alltoall dispatcher only, not with flex | remove it, or set "
     "`moe_token_dispatcher_type: alltoall`"),
    (MODEL, EXPERTS, own("moe_flex_dispatcher_backend: hybridep"),
     "8:50: `engine.megatron.moe_flex_dispatcher_backend`: hybridep is a backend of the flex "
     "dispatcher, which is not chosen | set `moe_token_dispatcher_type: flex`, or remove it"),
    ("", "", "engine: {implementation: local, megatron: {cuda_graph_impl: transformer_engine}}\n",
     "8:61: `engine.megatron.cuda_graph_impl`: this is TransformerEngine's, and `implementation` "
     "is local | set `engine.implementation: transformer_engine`"),
    ("", "", "engine: {implementation: local, megatron: {defer_embedding_wgrad_compute: true}}\n",
     "8:75: `engine.megatron.defer_embedding_wgrad_compute`: this is TransformerEngine's, and "
     "`implementation` is local | set `engine.implementation: transformer_engine`"),
    ("", "", "parallel: {etp: 2}\n",
     "8:17: `parallel.etp`: etp splits experts, and the model has none"
     " | remove it, or give `model.moe`"),
    ("", "", own("exp_avg_dtype: bf16"),
     "8:36: `engine.megatron.exp_avg_dtype`: without `use_precision_aware_optimizer` the state is "
     "in fp32 | set `use_precision_aware_optimizer: true`, or remove it"),
    (OPTIMIZER, OPTIMIZER.replace("}", ", zero: 0}"), own("use_precision_aware_optimizer: true"),
     "8:52: `engine.megatron.use_precision_aware_optimizer`: this is the distributed optimizer's, "
     "which is off | set `optimizer.zero: 1`, or remove it"),
    (OPTIMIZER, OPTIMIZER.replace("}", ", zero: 0}"),
     own("num_distributed_optimizer_instances: 2"),
     "8:58: `engine.megatron.num_distributed_optimizer_instances`: this is the distributed "
     "optimizer's, which is off | set `optimizer.zero: 1`, or remove it"),
    (OPTIMIZER, OPTIMIZER.replace("}", ", offload: cpu}"),
     own("use_precision_aware_optimizer: true", "exp_avg_sq_dtype: fp8"),
     "8:76: `engine.megatron.exp_avg_sq_dtype`: an offloaded state is updated by torch's Adam, in "
     "fp32 | remove one of the two"),
    ("", "", "precision: fp32\n" + own("use_precision_aware_optimizer: true",
                                       "main_params_dtype: fp16"),
     "9:77: `engine.megatron.main_params_dtype`: weights of `precision: fp32` have no main copy"
     " | remove it, or set `precision: bf16`"),
    ("", "", "engine: {implementation: local, megatron: {use_precision_aware_optimizer: true}}\n",
     "8:75: `engine.megatron.use_precision_aware_optimizer`: this is TransformerEngine's, and "
     "`implementation` is local | set `engine.implementation: transformer_engine`"),
    ("", "", own("attention_backend: local"),
     "8:40: `engine.megatron.attention_backend`: this is megatron-core's own attention, which "
     "comes with its own layers | set `engine.implementation: local`, or `unfused`"),
    ("", "", "engine: {implementation: local, megatron: {attention_backend: flash}}\n",
     "8:63: `engine.megatron.attention_backend`: this is TransformerEngine's, and `implementation` "
     "is local | set `engine.implementation: transformer_engine`"),
    ("", "", "parallel: {cp: 2}\n" + own("hierarchical_context_parallel_sizes: [2, 2]"),
     "9:58: `engine.megatron.hierarchical_context_parallel_sizes`: 2 x 2 ranks share a sequence, "
     "and cp is 2 | set `parallel.cp: 4`, or other sizes"),
    # what other engines would not read
    ("", "", "precision: fp4\nengine: {name: fsdp}\n",
     "8:12: `precision`: FSDP has no fp4 | remove it, or set `engine.name` to `megatron` or "
     "`megatron-lm`"),
    ("", "", "recompute: full\nrecompute_layers: 2\nengine: {name: deepspeed}\n",
     "9:19: `recompute_layers`: DeepSpeed computes all layers again, or none"
     " | remove it, or set `engine.name` to `megatron` or `megatron-lm`"),
    ("", "", "activation_offload_layers: 2\nengine: {name: ddp}\n",
     "8:28: `activation_offload_layers`: DDP keeps activations on the GPU"
     " | remove it, or set `engine.name` to `megatron`"),
    (MODEL, EXPERTS, "parallel: {etp: 2}\nengine: {name: fsdp}\n",
     "8:17: `parallel.etp`: FSDP reads no `parallel.etp`"
     " | remove it, or set `engine.name` to `megatron` or `megatron-lm`"),
    ("", "", "engine: {name: fsdp, megatron: {tp_comm_overlap: true}}\n",
     "8:32: `engine.megatron`: these are settings of megatron-core, and fsdp would not read them"
     " | remove them, or set `engine.name: megatron`"),
]  # fmt: skip

# (the optimizer's fields, lines at the end of the file, the problem)
OF_DEEPSPEED = [
    ("offload: nvme, zero: 1", DEEPSPEED,
     "5:32: `optimizer.offload`: offload to nvme needs ZeRO stage 3, not 1"
     " | set `optimizer.zero: 3`, or offload to `cpu`"),
    ("offload: nvme, zero: 2", DEEPSPEED,
     "5:32: `optimizer.offload`: offload to nvme needs ZeRO stage 3, not 2"
     " | set `optimizer.zero: 3`, or offload to `cpu`"),
    ("offload: cpu, zero: 0", "precision: fp32\n" + DEEPSPEED,
     "5:32: `optimizer.offload`: offload to cpu needs ZeRO stage 1, 2 or 3, not 0"
     " | set `optimizer.zero: 1`, or remove the offload"),
    ("zero: 0", DEEPSPEED,
     "1:1: `precision`: with DeepSpeed bf16 drifts at ZeRO stage 0"
     " | set `optimizer.zero: 1`, or `fp32`"),
    ("zero: 0", "precision: bf16\n" + DEEPSPEED,
     "8:12: `precision`: with DeepSpeed bf16 drifts at ZeRO stage 0"
     " | set `optimizer.zero: 1`, or `fp32`"),
    ("zero: 2", "parallel: {pp: 2}\n" + DEEPSPEED,
     "5:29: `optimizer.zero`: ZeRO stage 2 cannot be combined with pp 2"
     " | use stage 1, or pp 1"),
    ("zero: 1", "parallel: {tp: 2, sequence_parallel: true}\n" + DEEPSPEED,
     "8:38: `parallel.sequence_parallel`: DeepSpeed does not split norms over tp"
     " | remove it, or train with `engine.name: megatron`"),
    ("zero: 2", "engine: {name: deepspeed, deepspeed: {offload_parameters: cpu}}\n",
     "8:59: `engine.deepspeed.offload_parameters`: weights leave the GPU at ZeRO stage 3 only, "
     "not at 2 | set `optimizer.zero: 3`"),
    ("zero: 3", "engine: {name: deepspeed, deepspeed: {nvme_path: /scratch}}\n",
     "8:50: `engine.deepspeed.nvme_path`: nothing is offloaded to nvme"
     " | remove it, or set `optimizer.offload: nvme`"),
    ("zero: 1", "engine: {name: megatron, deepspeed: {adam: torch}}\n",
     "8:37: `engine.deepspeed`: these are settings of DeepSpeed, and megatron would not read them"
     " | remove them, or set `engine.name: deepspeed`"),
    ("zero: 3", "engine: {name: fsdp, ddp: {hook: bf16}}\n",
     "8:27: `engine.ddp`: these are settings of DDP, and fsdp would not read them"
     " | remove them, or set `engine.name: ddp`"),
    ("zero: 1", "engine: {name: deepspeed, deepspeed: {pin_memory: true}}\n",
     "8:39: `engine.deepspeed.pin_memory`: unknown key | known here: adam, "
     "gather_bucket, nvme_path, offload_parameters, reduce_bucket, reduce_precision"),
]  # fmt: skip

# (what stands behind the checkout, the problem)
OF_MEGATRON_LM = [
    ("arguments: {tensor-model-parallel-size: 4}",
     "8:97: `engine.arguments.tensor-model-parallel-size`: `parallel.tp` decides "
     "--tensor-model-parallel-size | remove it, and set `parallel.tp`"),
    ("arguments: {lr: 0.1}",
     "8:73: `engine.arguments.lr`: `optimizer.lr` decides --lr, and is 0.001, not 0.1"
     " | remove it, and set `optimizer.lr`"),
    ("arguments: {rampup-batch-size: [8, 8, 1000]}",
     "8:88: `engine.arguments.rampup-batch-size`: `batch.ramp_up` decides --rampup-batch-size"
     " | remove it, and set `batch.ramp_up`"),
    ("arguments: {no_bf16: true}",
     "8:78: `engine.arguments.no_bf16`: `precision` decides --no-bf16"
     " | remove it, and set `precision`"),
    ("arguments: {attention-backend: flash}",
     "8:88: `engine.arguments.attention-backend`: `engine.megatron.attention_backend` decides "
     "--attention-backend, and is auto, not flash | remove it, and set "
     "`engine.megatron.attention_backend`"),
    ("arguments: {hierarchical-context-parallel-sizes: [2, 2]}",
     "8:106: `engine.arguments.hierarchical-context-parallel-sizes`: "
     "`engine.megatron.hierarchical_context_parallel_sizes` decides "
     "--hierarchical-context-parallel-sizes | remove it, and set "
     "`engine.megatron.hierarchical_context_parallel_sizes`"),
    ("megatron: {exp_avg_dtype: fp16}",
     "8:83: `engine.megatron.exp_avg_dtype`: without `use_precision_aware_optimizer` the state is "
     "in fp32 | set `use_precision_aware_optimizer: true`, or remove it"),
    ("arguments: {save: /elsewhere}",
     "8:75: `engine.arguments.save`: hpctrain decides --save: it saves, resumes and ends launches"
     " | remove it"),
    ("arguments: {exit-duration-in-mins: 60}",
     "8:92: `engine.arguments.exit-duration-in-mins`: hpctrain decides --exit-duration-in-mins: "
     "it saves, resumes and ends launches | remove it"),
    ("arguments: {log-throughput: false}",
     "8:85: `engine.arguments.log-throughput`: a switch is on, or it is not given"
     " | remove it, or write `no-...: true`"),
    ("arguments: {cuda-graph-modules: [attn, --lr]}",
     "8:89: `engine.arguments.cuda-graph-modules`: an element beginning with `-` would be read as "
     "another argument | remove it"),
    ("arguments: {--attention-backend: flash}",
     "8:69: `engine.arguments.--attention-backend`: expected an argument without dashes such as "
     "`attention-backend`"),
]  # fmt: skip


def of_deepspeed(fields: str) -> tuple[str, str]:
    """The optimizer of VALID, and what replaces it."""
    return OPTIMIZER, f"optimizer: {{lr: 1e-3, {fields}}}"


@pytest.mark.parametrize(
    ("old", "new", "end", "expected"),
    [
        *WRONG,
        *((*of_deepspeed(fields), end, expected) for fields, end, expected in OF_DEEPSPEED),
        *(("", "", f"{ENGINE}, {more}}}\n", expected) for more, expected in OF_MEGATRON_LM),
    ],
)
def test_a_contradiction_has_a_place_and_a_hint(
    tmp_path: Path, old: str, new: str, end: str, expected: str
) -> None:
    assert old in VALID
    text = VALID.replace(old, new, 1) + end
    assert shown(tmp_path, problems_of(tmp_path, text)) == [expected]


@pytest.mark.parametrize(
    "more",
    [
        "{lr: 1e-3, hidden-size: 128, bf16: true}",  # as the fields say
        "{init-method-std: 0.01, use-rope-scaling: true}",  # whose fields are absent
        "{optimizer: muon, start-weight-decay: 0.1}",
        "{calculate-per-token-loss: true}, megatron: {calculate_per_token_loss: true}",
    ],
)
def test_an_argument_that_no_field_contradicts_is_passed_on(tmp_path: Path, more: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"{VALID}{ENGINE}, arguments: {more}}}\n")
    assert load_run_spec(path).document.engine.arguments


FINE = [
    ("", "", "precision: fp8\n" + own("fp8_recipe: delayed", "fp8_param_gather: true")),
    ("", "", "precision: fp4\n"),
    ("", "", own("grad_reduce_in_fp32: false", "cross_entropy_loss_fusion: true")),
    ("", "", "recompute: full\nrecompute_layers: 2\n"),
    ("", "", "activation_offload_layers: 3\n"),
    # the planner chooses a layout that has them
    ("", "", own("tp_comm_overlap: true", "defer_embedding_wgrad_compute: true")),
    ("", "", "parallel: {tp: 2}\n" + own("tp_comm_overlap: true")),
    ("", "", "parallel: {pp: 2}\n" + own("defer_embedding_wgrad_compute: true")),
    ("", "", "recompute: selective\n" + own("cuda_graph_impl: transformer_engine")),
    (MODEL, EXPERTS, own("moe_token_dispatcher_type: flex", "moe_permute_fusion: true",
                         "moe_flex_dispatcher_backend: hybridep")),
    (MODEL, SHARED, own("moe_shared_expert_overlap: true")),
    (MODEL, EXPERTS, "parallel: {tp: 2, etp: 2, ep: 2}\n"),
    ("", "", own("use_precision_aware_optimizer: true", "exp_avg_dtype: fp8")),
    # as Megatron-LM wants it
    (OPTIMIZER, OPTIMIZER.replace("}", ", offload: cpu}"),
     own("use_precision_aware_optimizer: true")),
    ("", "", "engine: {implementation: local, megatron: {attention_backend: local}}\n"),
    ("", "", own("num_distributed_optimizer_instances: 2", "calculate_per_token_loss: true")),
    ("", "", "parallel: {cp: 4}\n" + own("hierarchical_context_parallel_sizes: [2, 2]")),
]  # fmt: skip

FINE_OF_DEEPSPEED = [
    ("offload: nvme", DEEPSPEED),
    ("zero: 0", "precision: fp32\n" + DEEPSPEED),
    ("zero: 1", "parallel: {pp: 2}\n" + DEEPSPEED),
    ("offload: cpu, zero: 2", DEEPSPEED),
    (
        "zero: 3",
        "engine: {name: deepspeed, deepspeed: {offload_parameters: nvme, nvme_path: /x}}\n",
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "end", "engine"),
    [
        *((*row, "megatron") for row in FINE),
        *((*of_deepspeed(fields), end, "deepspeed") for fields, end in FINE_OF_DEEPSPEED),
    ],
)
def test_what_goes_together_is_taken(
    tmp_path: Path, old: str, new: str, end: str, engine: str
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(VALID.replace(old, new, 1) + end)
    assert load_run_spec(file).document.engine.name == engine


def test_what_an_option_contradicts_is_said_without_a_line(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, VALID + DEEPSPEED, "optimizer.zero=0")
    assert "bf16 drifts" in problem.message and problem.hint


# -- Arguments of an external Megatron-LM that contradict the plan ------------------------------


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            "engine: {name: megatron-lm}",
            "8:16: `engine.name`: engine megatron-lm needs `checkout`, the directory of the "
            "Megatron-LM | add `checkout: /path/to/Megatron-LM`",
        ),
        (
            f"engine: {{name: megatron, {CHECKOUT}}}",
            "8:36: `engine.checkout`: this is for an external Megatron-LM, and megatron would not "
            "read it | remove it, or set `engine.name: megatron-lm`",
        ),
    ],
)
def test_the_checkout_and_its_engine(tmp_path: Path, engine: str, expected: str) -> None:
    assert shown(tmp_path, problems_of(tmp_path, f"{VALID}{engine}\n")) == [expected]


def test_what_nobody_decides_may_be_given(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"{VALID}{ENGINE}, arguments: {{log-throughput: true, num-workers: 4}}}}\n")
    engine = load_run_spec(path, ()).document.engine
    assert engine.arguments == {"log-throughput": True, "num-workers": 4}
    assert engine.entry == "pretrain_gpt.py"


def test_names_are_known_in_both_spellings_and_negated() -> None:
    assert refusal("seq_length") == refusal("seq-length")
    assert refusal("no-overlap-grad-reduce") is not None
    assert refusal("num-workers") is None
    assert not FIELD_OF.keys() & KEPT_BACK


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("checkpoint.every=1h", "checkpoint.every"),
        ("supervise.rollback.spike=10", "supervise.rollback.spike"),
        ("supervise.rollback.mode=act", "supervise.rollback.skip_steps"),
        ("supervise.speed_check.mode=report", "supervise.speed_check.mode"),
        ("model.mtp_layers=1", "model.mtp_layers"),
        ("precision=fp8", "precision"),
        ("data.format=packed", "data.format"),
        ("engine.megatron.cuda_graph_impl=local", "engine.megatron.cuda_graph_impl"),
    ],
)
def test_what_megatron_lm_cannot_do_is_refused(tmp_path: Path, override: str, field: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"{VALID}{ENGINE}}}\n")
    assert untrainable_fields(load_run_spec(path, ()).document) == []
    spec = load_run_spec(path, (override,)).document
    assert [name for name, _ in untrainable_fields(spec)] == [field]
