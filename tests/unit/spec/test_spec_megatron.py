"""What megatron-core cannot combine, or would ignore, is refused where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.spec.loader import load_run_spec

MODEL = "model: {layers: 4, hidden: 128, heads: 4, vocab: 1024, seq: 128}"
EXPERTS = MODEL.replace("}", ", moe: {experts: 8, top_k: 2, ffn: 64}}")
SHARED = EXPERTS.replace("ffn: 64}", "ffn: 64, shared_ffn: 64}, bias: false")
OPTIMIZER = "optimizer: {lr: 1e-3}"
OWN = "engine: {{megatron: {{{}}}}}\n"


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
    (OPTIMIZER, "optimizer: {lr: 1e-3, distributed: false}",
     "precision: fp8\n" + own("fp8_param_gather: true"),
     "9:39: `engine.megatron.fp8_param_gather`: weights are gathered in 8 bits by the distributed "
     "optimizer, which is off | set `optimizer.distributed: true`, or remove it"),
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


@pytest.mark.parametrize(("old", "new", "end", "expected"), WRONG)
def test_a_contradiction_has_a_place_and_a_hint(
    tmp_path: Path, old: str, new: str, end: str, expected: str
) -> None:
    assert old in VALID
    text = VALID.replace(old, new, 1) + end
    assert shown(tmp_path, problems_of(tmp_path, text)) == [expected]


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
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "end"), FINE)
def test_what_goes_together_is_taken(tmp_path: Path, old: str, new: str, end: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(VALID.replace(old, new, 1) + end)
    assert load_run_spec(file).document.engine.name == "megatron"
