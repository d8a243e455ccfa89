"""From documents to a case of the cost model: a spec on a cluster, for many layouts at once.

Belongs here: which field of a spec, a profile or a calibration becomes which number of a case.
Does not belong here: formulas, constants, or which layouts there are (`hpctrain.plan.search.grid`).
"""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from math import sqrt
from typing import TYPE_CHECKING

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.plan.cost.case import Case, Machine, Mesh, Shape, Software
from hpctrain.plan.cost.constants import calibration_of, machine_of, software_of
from hpctrain.plan.cost.lora_counts import learned_share, thin_parameters
from hpctrain.plan.cost.modules import eager
from hpctrain.plan.documents import DEFAULT_ORDER, ORDERS
from hpctrain.plan.model import vision
from hpctrain.plan.model.parameters import BERT_SEGMENTS, vocab_multiple
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.calibration import Calibration, SoftwareCalibration
from hpctrain.spec.run import ModelSpec, RunSpec

if TYPE_CHECKING:
    from hpctrain.plan.mesh.columns import Columns

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}  # fp8: weights stay in 16 bits
GRADIENT_BYTES = 4  # one fp32 buffer (DistributedDataParallelConfig.grad_reduce_in_fp32)
# Two fp32 moments of Adam; 16-bit weights have an fp32 main copy besides
# (megatron/core/optimizer/optimizer.py, Float16OptimizerWithFloat16Params and FP32Optimizer).
OPTIMIZER_BYTES = {"fp32": 8, "fp16": 12, "bf16": 12, "fp8": 12}
MOMENT_BYTES = 8


def case_of(request: PlanRequest, columns: Columns) -> Case:
    """The case of all rows of `columns`; without a known GPU it is good for memory only.

    Without knowledge the software has no overheads, no overlap and no allocator's slack.
    """
    spec = request.spec
    shape = replace(
        shape_of(spec.model),
        vocab_multiple=vocab_multiple(spec),
        thin=thin_parameters(spec),
        thin_rank=spec.lora.rank if spec.lora else 0,
        learned=learned_share(spec),
    )
    machine = machine_for(request) or NO_MACHINE
    return Case(shape, mesh_of(spec, columns), machine, software_for(request))


def shape_of(model: ModelSpec) -> Shape:
    """The model as the formulas see it."""
    if model.family == "resnet":
        return resnet_shape(model)
    moe, mla = model.moe, model.mla
    dense = moe.dense_layers if moe else model.layers
    return Shape(
        layers=model.layers,
        hidden=model.hidden,
        seq=model.seq,
        # a ViT classifies one token of an image: as many logits as that makes for each token
        vocab=model.vocab / model.seq if model.family == "vit" else model.vocab,
        attention_blocks=model.layers,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        qk_dim=model.query_key_size,
        value_dim=model.value_size,
        causal=int(model.causal),
        mla=int(mla is not None),
        q_rank=(mla.q_rank or 0) if mla else 0,
        kv_rank=mla.kv_rank if mla else 0,
        rope_dim=mla.rope_dim if mla else 0,
        mlp_blocks=dense,
        dense_first=int(moe is not None),
        ffn=model.ffn_size,
        gated=int(model.gated),
        moe_blocks=model.layers - dense,
        experts=moe.experts if moe else 1,
        top_k=moe.top_k if moe else 1,
        expert_ffn=moe.ffn if moe else 0,
        expert_hidden=model.hidden,
        shared_ffn=moe.shared_ffn if moe else 0,
        mtp_layers=model.mtp_layers,
        tied=int(bool(model.tied)),
        position_rows=position_rows(model),
        biased=int(bool(model.bias)),
        rope=int(model.positions == "rope"),
        rms_norm=int(model.norm == "rmsnorm"),
        dropout=model.dropout,
    )


def position_rows(model: ModelSpec) -> int:
    """Rows of h in embeddings that are not of words: of positions, and of BERT's segments."""
    learned = model.seq if model.positions == "learned" else 0
    return learned + (BERT_SEGMENTS if model.family == "bert" else 0)


def resnet_shape(model: ModelSpec) -> Shape:
    """A ResNet as MLP blocks with its weights, its multiplications and its activations.

    Of T positions, hidden size h and MLP size f, L blocks have 2 L h f weights, make T times as
    many multiplications and keep 2 T L (h + f) numbers (`memory.mlp_kept`), which are those of
    `vision.resnet_kept`. h and f are the roots of x^2 - (h + f) x + h f. Good
    enough to plan data parallelism, which needs no more.
    """
    layers = list(vision.resnet_convolutions(model))
    weights = vision.resnet_parameters(model)
    positions = vision.resnet_multiplications(model) / weights
    kept = vision.resnet_kept(model)
    total, product = kept / (2 * positions * len(layers)), weights / (2 * len(layers))
    root = sqrt(max(0.0, total**2 / 4 - product))
    ffn = total / 2 + root
    return Shape(
        layers=len(layers),
        hidden=product / ffn,
        seq=positions,
        vocab=1,
        attention_blocks=0,
        heads=1,
        kv_heads=1,
        qk_dim=1,
        value_dim=1,
        causal=0,
        mlp_blocks=len(layers),
        ffn=ffn,
        tied=1,
    )


def mesh_of(spec: RunSpec, columns: Columns) -> Mesh:
    """All layouts as real numbers; fields that the spec fixes are plain numbers."""
    near, again = columns.order == ORDERS.index(DEFAULT_ORDER), spec.recompute_modules
    return Mesh(
        tp=columns.tp.astype(float),
        pp=columns.pp.astype(float),
        vpp=columns.vpp.astype(float),
        cp=columns.cp.astype(float),
        ep=columns.ep.astype(float),
        dp=columns.dp.astype(float),
        micro_batch=columns.micro_batch.astype(float),
        accumulation=columns.accumulation.astype(float),
        sequence_parallel=columns.sequence_parallel.astype(float),
        zero=columns.zero.astype(float),
        recompute=columns.recompute.astype(float),
        layers_first=columns.layers_first.astype(float),
        layers_middle=columns.layers_middle.astype(float),
        layers_last=columns.layers_last.astype(float),
        shard_gpus=columns.shard_gpus.astype(float),
        offload=columns.offload.astype(float) * (2 if spec.optimizer.offload == "nvme" else 1),
        again_core=int("core_attn" in again),
        again_mlp=int("mlp" in again),
        again_moe=int("moe" in again),
        again_norm=int("layernorm" in again),
        again_activation=int("moe_act" in again),
        again_up=int("mla_up_proj" in again),
        pipeline_outside=near.astype(float),
        low=int(spec.precision == "fp8"),
        element_bytes=ELEMENT_BYTES[spec.precision],
        gradient_bytes=gradient_bytes(spec),
        summed_bytes=summed_bytes(spec),
        summed_inside=gradient_bytes(spec) if hook_of(spec) == "hierarchical" else 0,
    )


def hook_of(spec: RunSpec) -> str:
    """How DistributedDataParallel sums gradients; `none` for every other engine."""
    return spec.engine.ddp.hook if spec.engine.abilities.gradient_hook else "none"


def summed_bytes(spec: RunSpec) -> float:
    """Bytes of each gradient that goes through the slowest link.

    PowerSGD sends two matrices of its rank in place of a square one (Vogels et al. 2019, arXiv
    1905.13727, algorithm 1).
    """
    hook = hook_of(spec)
    if hook == "powersgd":
        thin = 2 * spec.engine.ddp.powersgd_rank / spec.model.hidden
        return gradient_bytes(spec) * min(1.0, thin)
    return gradient_bytes(spec) / (1 if hook == "none" else 2)


def machine_for(request: PlanRequest) -> Machine | None:
    """The GPU and its links with the shares that kernels reach; None when it is not known."""
    spec, profile, knowledge = request.spec, request.profile, request.knowledge
    if knowledge is None or knowledge.gpu is None:
        return None
    calibration, gpu, switches = knowledge.calibration, knowledge.gpu, profile.network.switches
    return machine_of(
        gpu,
        calibration_of(calibration, gpu),
        engine_calibration(spec, calibration),
        precision=spec.precision,
        leaf_gpus=(switches.nodes_per_leaf or 0) * profile.gpu.per_node,
        oversubscription=switches.oversubscription,
    )


def software_for(request: PlanRequest) -> Software:
    """The engine's generation, with what spec and profile say of it."""
    spec, profile, knowledge = request.spec, request.profile, request.knowledge
    calibration = knowledge.calibration if knowledge else None
    base = software_of(engine_calibration(spec, calibration)) if calibration else PLAIN
    abilities = spec.engine.abilities
    said = replace(
        base,
        flash=int(uses_flash_attention(spec)),
        dp_overlap=data_overlap(spec, calibration, base),
        late_sums=int(abilities.sums_behind_pipeline),
        scatter_gather=1.0 if abilities.splits_stage_messages else base.scatter_gather,
        main_bytes=optimizer_bytes(spec),
        context_bytes=float(profile.gpu.reserved),
    )
    return replace(said, **eager(spec))


def gradient_bytes(spec: RunSpec) -> float:
    """For each parameter; what is frozen (LoRA) has no gradient."""
    return GRADIENT_BYTES * learned_share(spec)


def optimizer_bytes(spec: RunSpec) -> float:
    """For each parameter; what is frozen has no moments.

    It has an fp32 main copy where the module itself is in fp32 (FSDP, DDP). DeepSpeed keeps the
    module in bf16, and such copies for what its optimizer is given, only.
    """
    learned = learned_share(spec)
    main = OPTIMIZER_BYTES[spec.precision] - MOMENT_BYTES
    copied = learned if spec.engine.abilities.main_copy_of_trained_only else 1.0
    return main * copied + MOMENT_BYTES * learned


def data_overlap(spec: RunSpec, calibration: Calibration | None, base: Software) -> float:
    """Share of data parallel traffic that can hide; half of it for each of the two switches."""
    hidden = float(base.dp_overlap)
    measured = spec.engine.abilities.overlap_calibration
    if measured is not None and calibration and measured in calibration.software:
        hidden = calibration.software[measured].dp_overlap
    switches = (spec.optimizer.overlap_grad_reduce, spec.optimizer.overlap_param_gather)
    return hidden * sum(switches) / len(switches)


def engine_calibration(spec: RunSpec, calibration: Calibration) -> SoftwareCalibration:
    """The software that the engine is like. Raises InvalidInputError where the file lacks it."""
    key = spec.engine.abilities.calibration
    if key not in calibration.software:
        raise InvalidInputError([Problem(f"the calibration has no software `{key}`")])
    return calibration.software[key]


def uses_flash_attention(spec: RunSpec) -> bool:
    """True when Megatron's attention is computed without s x s tensors.

    `implementation: auto` counts as TransformerEngine: clusters with GPUs have it, and where it
    is missing (the sandbox) models are tiny. fp32 has no flash kernel.
    """
    return spec.engine.implementation != "local" and spec.precision != "fp32"


def _nothing(record: type) -> dict[str, float]:
    """0 for every field without a default."""
    return {one.name: 0.0 for one in fields(record) if one.default is MISSING}


PLAIN = Software(**_nothing(Software))
NO_MACHINE = Machine(**{name: 1.0 for name in _nothing(Machine)})
