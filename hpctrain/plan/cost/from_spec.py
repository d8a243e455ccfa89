"""Build a case of the cost model from a spec and a profile, for many layouts at once.

Belongs here: the translation of spec, profile, data sheet and calibration into the numbers that the
formulas take. Does not belong here: formulas, the values of constants
(`catalogue/gpus.yaml`, `catalogue/calibration.yaml`), which layouts there are
(`hpctrain.plan.search.space`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.plan.cost.case import Array, Case, Machine, Mesh, Shape, Software
from hpctrain.plan.cost.multipliers import corrected
from hpctrain.plan.layout_words import DEFAULT_ORDER, ORDERS
from hpctrain.plan.mesh.candidate import MODULES
from hpctrain.plan.mesh.placement import priced_domains
from hpctrain.plan.model import vision
from hpctrain.plan.model.number_formats import ELEMENT_BYTES as ELEMENT_BYTES
from hpctrain.plan.model.number_formats import (
    FP32_BYTES,
    LOW_PRECISIONS,
    MOMENT_BYTES,
    OPTIMIZER_BYTES,
    gradient_bytes,
    keeps_main_weights,
    kept_input_bytes,
    low_weight_bytes,
    projected_bytes,
    saved_state_bytes,
    sent_weight_bytes,
)
from hpctrain.plan.model.parameters import (
    matrix_parameters,
    orthogonal_flops,
    total_parameters,
)
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.calibration import (
    FORWARD_RATIO,
    HALF_LENGTH,
    HALF_LENGTH_CAUSAL,
    Calibration,
    FabricCalibration,
    GpuCalibration,
    SiteCalibration,
    SoftwareCalibration,
)
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.document import Document
from hpctrain.spec.engines.abilities import (
    MEGATRON_CORE,
    TRANSFORMERS,
    GradientAddition,
    Precision,
)
from hpctrain.spec.engines.megatron import WGRAD_DEFERRAL_LIMIT
from hpctrain.spec.engines.native import POWERSGD_RANK
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.spec.run import ModelSpec, RunSpec

if TYPE_CHECKING:
    from hpctrain.plan.mesh.candidate import Columns, Whole


# -- Constants of one GPU and one generation of software: data sheets times calibrated shares ---


# What copies between pinned host memory and a GPU reach of the link: 25 of PCIe 4's 32 GB/s.
HOST_LINK_SHARE = 25 / 32
PCIE4_BANDWIDTH = 32e9  # bytes/s and direction of 16 lanes; PCI-SIG, PCI Express 4.0
# What the driver keeps of the memory that it reports: 143,771 MiB are 139.8 GiB to a program on an
# H200 (docs/gpu.md), 81,920 MiB are 79.15 GiB on an A100.
DRIVER_BYTES = 0.6 * 2**30
# Of CUDA: 400 MB since kernels are loaded when they are called (CUDA 11.7, pytorch/pytorch issue
# 109888), and some for cuBLAS, whose workspaces are the allocator's. Before it were 1.3 GB
# (transformers' documentation, "GPU memory": "kernels alone take up").
CONTEXT_BYTES = 0.5 * 2**30
# NCCL's buffers of one communicator: 10 MiB (NVIDIA/nccl issue 1685, allocations in its log) for
# each of 24 channels over an A100's NVLinks and of three neighbours, two in a tree, one in a ring.
COMMUNICATOR_BYTES = 24 * 3 * 10 * 2**20
# Activations as they lie in memory over their bytes, where the allocator cannot grow its segments
# (before PyTorch 2.1, on AMD's GPUs): freed blocks between kept ones. BLOOM's trials want 1.1 to
# 1.18, 410 layouts of Aleph Alpha at least 1.1, the zero-bubble runs at most 1.12, with which they
# still fit (bench/fit_memory.py).
FRAGMENTED = 1.12
# The peak rates that stand for one that is not listed, in this order.
_PEAKS: Mapping[str, tuple[Precision, ...]] = {
    "fp32": ("fp32",),
    "fp16": ("fp16", "bf16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
}


def calibration_of(calibration: Calibration, gpu: Gpu) -> GpuCalibration:
    """Select the constants of this GPU, else of its generation, else of the last one listed.

    Raises InvalidInputError when a calibration has no GPU at all.
    """
    for key in (gpu.name, gpu.generation):
        if key in calibration.gpus:
            return calibration.gpus[key]
    if not calibration.gpus:
        raise InvalidInputError([Problem("the calibration names no GPU")])
    return list(calibration.gpus.values())[-1]


def calibrated_at_site(calibration: Calibration, site: SiteCalibration, gpu: Gpu) -> Calibration:
    """Put the figures that a site has measured in place of the packaged ones.

    Rates of links become shares of what catalogue and profile give for this GPU; the network's
    takes the place of that of every fabric, as a site has one.
    """
    shares: dict[str, object] = {
        name: value
        for name in ("product_efficiency", "flash_efficiency", "memory_efficiency")
        if (value := getattr(site, name)) is not None
    }
    if site.nvlink_bandwidth is not None:
        shares["nvlink_efficiency"] = min(1.0, site.nvlink_bandwidth / gpu.nvlink_bandwidth)
    shares["provenance"] = site.provenance
    own = calibration_of(calibration, gpu).model_copy(update=shares)
    fabrics = calibration.fabrics
    if site.network_bandwidth is not None:
        share = min(1.0, site.network_bandwidth / gpu.network_bandwidth)
        measured = {"network_efficiency": share, "provenance": site.provenance}
        fabrics = {name: one.model_copy(update=measured) for name, one in fabrics.items()}
    return calibration.model_copy(
        update={"gpus": {**calibration.gpus, gpu.name: own}, "fabrics": fabrics}
    )


def machine_of(
    gpu: Gpu,
    shares: GpuCalibration,
    fabric: FabricCalibration,
    *,
    precision: str = "bf16",
    leaf_gpus: int = 0,
    oversubscription: float = 1.0,
) -> Machine:
    """Describe a GPU with its links. `precision`: fp32, fp16, bf16, fp8 or fp4.

    A GPU without the low precision computes at its 16-bit rate. Raises InvalidInputError if it
    lists no rate of the precision (see `peak_rate`).
    """
    wide = "bf16" if precision in ("fp8", "fp4") else precision
    return Machine(
        peak=peak_rate(gpu, wide),
        peak_low=peak_rate(gpu, precision),
        memory_bandwidth=float(gpu.memory_bandwidth),
        nvlink_bandwidth=float(gpu.nvlink_bandwidth),
        network_bandwidth=float(gpu.network_bandwidth),
        domain=gpu.nvlink_domain,
        low_efficiency=shares.fp4_efficiency if precision == "fp4" else shares.fp8_efficiency,
        half_length=HALF_LENGTH,
        half_length_causal=HALF_LENGTH_CAUSAL,
        forward_ratio=FORWARD_RATIO,
        **_constants(shares, Machine),
        **_constants(fabric, Machine),
        leaf_gpus=leaf_gpus,
        oversubscription=oversubscription,
        host_bandwidth=HOST_LINK_SHARE * float(gpu.host_bandwidth or PCIE4_BANDWIDTH),
    )


def peak_rate(gpu: Gpu, precision: str) -> float:
    """Return the dense FLOP/s of a precision, or of the next wider one that the GPU lists.

    A narrower one is no measure: units for 16 bits and fewer do several times what those for 32
    do (V100: 125 and 15.7 TFLOP/s). Raises InvalidInputError where no such precision is listed.
    """
    for name in _PEAKS[precision]:
        if name in gpu.peak:
            return float(gpu.peak[name])
    message = f"GPU {gpu.name} has no peak rate of {precision}"
    raise InvalidInputError([Problem(message, hint=f"give it: `gpu.peak.{precision}`")])


def newer(gpu: Gpu) -> bool:
    """Tell whether a GPU has kernels of attention that FlashAttention-2 does not reach."""
    return gpu.generation not in ("volta", "ampere", "ada", "cdna2", "cdna3")


def fabric_of(calibration: Calibration, fabric: str) -> FabricCalibration:
    """Select the constants of a network. Raises InvalidInputError if it is missing."""
    if fabric not in calibration.fabrics:
        raise InvalidInputError([Problem(f"the calibration has no fabric `{fabric}`")])
    return calibration.fabrics[fabric]


def software_entry(
    calibration: Calibration, engine: str, *, eager: bool = False, local: bool = False
) -> SoftwareCalibration:
    """Select the constants that `plan` takes for an engine, ours or that of a published run.

    `eager` and `local`: see `software_name`. Raises InvalidInputError if the calibration has no
    such software.
    """
    key = software_name(engine, eager=eager, local=local)
    if key not in calibration.software:
        raise InvalidInputError([Problem(f"the calibration has no software `{key}`")])
    return calibration.software[key]


def software_name(engine: str, *, eager: bool = False, local: bool = False) -> str:
    """Name the software that an engine is: what it has today, not what it was.

    Megatron's own FSDP shares all kernels with the rest of megatron-core. `local`: Megatron's
    layers without TransformerEngine, whose elementwise kernels are those of Megatron-LM before
    it. `eager`: layers out of PyTorch's operations, such as Hugging Face's classes under FSDP, DDP
    and DeepSpeed.
    """
    key = abilities_of(engine.removesuffix("-fsdp")).calibration
    if eager:
        return "hugging-face"
    return "megatron-2022" if local and key == "megatron-core" else key


def software_of(calibration: SoftwareCalibration) -> Software:
    """Select the constants of one generation of software."""
    return Software(**_constants(calibration, Software))


def _constants(measured: Document, record: type[Machine] | type[Software]) -> dict[str, float]:
    """Select the fields of a calibration that a record of the cost model has, too."""
    names = {field.name for field in fields(record)}
    return {name: value for name, value in measured if name in names}


# -- The case of a request -----------------------------------------------------------------------


# What a mesh has as a table of candidates has it.
_IN_COLUMNS = (
    *("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch", "accumulation"),
    *("sequence_parallel", "zero", "shard_gpus", "recompute"),
    *("layers_first", "layers_middle", "layers_last"),
)
# Per logit and pass, in the mean: three kernels forward, which read 2, 4 and 4 bytes and write 4
# each, and one backward, which reads 4 and writes 2 (fusions/fused_cross_entropy.py). Memory is
# that of the unfused one: fp32 exponentials, which become the gradient in place.
FUSED_LOSS_BYTES = 14.0
# Per pair of tokens and head in 16 bits: megatron-core's own attention computes the softmax in fp32
# and keeps it (fusions/fused_softmax.py, forward_torch_softmax); Apex's fused one is not used.
SOFTMAX_BYTES = 4.0
# Rows of the fullest rank's experts over the mean, where a loss balances them: 1.03 by the bytes of
# Megatron-LM's functional test mixtral_8x7b_tp1pp4ep8vpp8_release, and some more.
EXPERT_IMBALANCE = 1.05


def case_of(request: PlanRequest, columns: Columns) -> Case:
    """Build the case of all rows of `columns`; without a known GPU it serves for memory only.

    Without knowledge the software has no overheads, no overlap and no allocator slack.
    """
    spec, counts = request.spec, request.counts
    shape = replace(
        shape_of(spec.model),
        vocab_multiple=counts.vocab_multiple,
        adapters=counts.adapters_per_layer,
        adapter_rank=spec.lora.rank if spec.lora else 0,
        trainable=counts.trainable_share,
    )
    machine = machine_for(request) or NO_MACHINE
    domains = priced_domains(columns, spec.resources, request.profile)
    machine = replace(machine, domain=domains)
    case = Case(shape, mesh_of(request, columns), machine, software_for(request))
    return corrected(case, request)


# Tokens that linear attention computes as one product (modeling_qwen3_next.py, chunk_size).
_LINEAR_CHUNK = 64


def shape_of(model: ModelSpec) -> Shape:
    """Translate a model into the numbers that the formulas take."""
    if model.family == "resnet":
        return resnet_shape(model)
    moe, mla = model.moe, model.mla
    mixers = [kind.mixer for kind in model.kinds]
    encoder = model.encoder_layers
    if encoder:
        mixers = ["full"] * encoder
    attending = [mixer for mixer in mixers if mixer in ("full", "window", "chunk")]
    windows = len(attending) - attending.count("full")
    dense = encoder or sum(kind.mlp for kind in model.kinds)
    return Shape(
        layers=model.layers,
        hidden=model.hidden,
        seq=model.seq,
        # a ViT classifies one token of an image: as many logits as that makes for each token
        vocab=model.vocab / model.seq if model.family == "vit" else model.vocab,
        attention_blocks=len(attending),
        window=(model.attends.window or model.attends.chunk or 0) if windows else 0,
        window_share=windows / len(attending) if attending else 0,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        qk_dim=model.query_key_size,
        value_dim=model.value_size,
        causal=int(model.causal and not encoder),
        score_gradients=int(model.positions == "relative"),
        decoder_blocks=model.layers if encoder else 0,
        written_seq=model.target_seq,
        beside_layers=encoder,
        mla=int(mla is not None),
        q_rank=(mla.q_rank or 0) if mla else 0,
        kv_rank=mla.kv_rank if mla else 0,
        rope_dim=mla.rope_dim if mla else 0,
        mlp_blocks=dense,
        dense_first=int(moe is not None),
        ffn=model.ffn_size,
        gated=int(model.gated),
        moe_blocks=sum(kind.experts for kind in model.kinds),
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
        **_scan(model, len(mixers) - len(attending) - mixers.count("mlp") - mixers.count("moe")),
    )


def _scan(model: ModelSpec, blocks: int) -> dict[str, int]:
    """Describe the state spaces of a model; linear attention is priced as one with its state."""
    if model.mamba is not None:
        inner, state, groups = model.mamba.inner, model.mamba.state, model.mamba.groups
        heads, chunk = model.mamba.heads, model.mamba.chunk
    elif model.linear is not None:
        heads, chunk = model.linear.value_heads, _LINEAR_CHUNK
        inner, state = heads * model.linear.value_dim, model.linear.key_dim
        groups = model.linear.key_heads
    else:
        return {}
    return dict(
        mamba_blocks=blocks,
        mamba_inner=inner,
        mamba_state=state,
        mamba_groups=groups,
        mamba_heads=heads,
        mamba_chunk=chunk,
    )


def position_rows(model: ModelSpec) -> int:
    """Count rows of h in other embeddings than words: of positions, and of BERT's segments."""
    if model.positions != "learned":
        return model.segments
    stacks = 2 if model.encoder_layers else 1
    rows = (model.max_seq or model.seq) + model.position_offset
    return stacks * rows + model.segments


def resnet_shape(model: ModelSpec) -> Shape:
    """Describe a ResNet as MLP blocks with its weights, multiplications and activations.

    Of T positions, hidden size h and MLP size f, L blocks have 2 L h f weights, make T times as
    many multiplications and keep 2 T L (h + f) numbers (`memory.mlp_kept`), which are those of
    `vision.resnet_kept`. h and f are the roots of x^2 - (h + f) x + h f. That is exact enough
    for data parallelism.
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


def mesh_of(request: PlanRequest, columns: Columns) -> Mesh:
    """Translate all layouts into real numbers; fields that the spec fixes are plain numbers.

    Frozen parameters (LoRA) have no gradient. PowerSGD sends two matrices of its rank instead of a
    square one (Vogels et al. 2019, arXiv 1905.13727, algorithm 1); the other hooks of
    DistributedDataParallel halve the bytes on the slowest link.
    """
    spec = request.spec
    near = columns.order == ORDERS.index(DEFAULT_ORDER)
    bits = columns.recompute_modules
    own, trainable = spec.engine.megatron, request.counts.trainable_share
    each, element = gradient_bytes(spec), ELEMENT_BYTES[spec.precision]
    held = each * trainable
    hook = spec.engine.ddp.hook if spec.engine.abilities.gradient_hook else "none"
    sent_share = 1.0 if hook == "none" else 0.5
    if hook == "powersgd":
        sent_share = min(1.0, 2 * POWERSGD_RANK / spec.model.hidden)
    way = spec.engine.abilities.gradient_addition
    if way == "product" and spec.engine.implementation == "local":
        # Megatron's layers without TransformerEngine add to main gradients by kernels of their own
        way = "main"
    return Mesh(
        **{name: getattr(columns, name).astype(float) for name in _IN_COLUMNS},
        offload=columns.offload.astype(float) * (2 if spec.optimizer.offload == "nvme" else 1),
        **{f"again_{name}": _number(bits >> bit & 1) for bit, name in enumerate(MODULES)},
        pipeline_outside=near.astype(float),
        full_layers=_number(columns.recompute_layers),
        kept_on_host=_number(columns.offloaded_layers),
        low=int(spec.precision in LOW_PRECISIONS),
        element_bytes=element,
        gradient_bytes=held,
        summed_bytes=held * sent_share,
        summed_inside=held if hook == "hierarchical" else 0,
        added_bytes=added_bytes(way, element, each, columns.accumulation.astype(float)),
        gather_bytes=sent_weight_bytes(spec),
        low_bytes=low_weight_bytes(spec, request.generation),
        low_only=int(own.fp8_param_gather),
        imbalance=np.where(columns.ep > 1, EXPERT_IMBALANCE, 1.0),
        input_bytes=kept_input_bytes(spec),
        projected_bytes=projected_bytes(spec),
        # distrib_optimizer.py: shard_main_param.grad = shard_model_grad.float(), but for
        # `decoupled_grad`
        gradient_copy=(
            FP32_BYTES * trainable if each < FP32_BYTES and not keeps_main_weights(spec) else 0
        ),
        saved_state=_saved_state(spec),
        orthogonal_flops=(orthogonal_flops(spec.model) if spec.optimizer.kind == "muon" else 0),
        instances=own.num_distributed_optimizer_instances,
        near_context=(own.hierarchical_context_parallel_sizes or (1, 1))[0],
        deferred_output=WGRAD_DEFERRAL_LIMIT if own.defer_embedding_wgrad_compute else 0,
    )


def _number(column: Whole) -> Array:
    """Convert a column, to a plain number where all rows are the same."""
    same = len(column) > 0 and bool((column == column[0]).all())
    return float(column[0]) if same else column.astype(float)


def machine_for(request: PlanRequest) -> Machine | None:
    """Describe the GPU and its links with calibrated efficiencies; None when it is not known."""
    spec, profile, knowledge = request.spec, request.profile, request.knowledge
    if knowledge is None or knowledge.gpu is None:
        return None
    calibration, gpu, switches = knowledge.calibration, knowledge.gpu, profile.network.switches
    return machine_of(
        gpu,
        calibration_of(calibration, gpu),
        fabric_of(calibration, profile.network.fabric),
        precision=spec.precision,
        leaf_gpus=(switches.usable_nodes or 0) * profile.gpu.per_node,
        oversubscription=switches.oversubscription,
    )


def software_for(request: PlanRequest) -> Software:
    """Describe the engine's software for one spec and profile.

    What hides behind compute does so where the spec switches it on. Optimizer bytes are per
    parameter; frozen ones have no moments. They have an fp32 main copy where the module itself is
    in fp32 (FSDP, DDP). DeepSpeed keeps the module in bf16, and main copies only of what its
    optimizer updates.
    """
    spec, knowledge, abilities = request.spec, request.knowledge, request.spec.engine.abilities
    base = PLAIN
    if knowledge is not None:
        eager_classes = abilities.model_classes == TRANSFORMERS
        local = spec.engine.implementation == "local"
        measured = software_entry(
            knowledge.calibration, spec.engine.name, eager=eager_classes, local=local
        )
        # megatron-core without TransformerEngine has no fused softmax
        passes = knowledge.calibration.attention["torch"].softmax_passes
        base = replace(software_of(measured), softmax_passes=passes)
    trainable = request.counts.trainable_share
    main = OPTIMIZER_BYTES[spec.precision] - MOMENT_BYTES
    copied = trainable if abilities.main_copy_of_trained_only else 1.0
    # outside of the allocator is what the profile says, else what is usual
    outside = dict(
        context_bytes=DRIVER_BYTES + CONTEXT_BYTES, communicator_bytes=COMMUNICATOR_BYTES
    )
    if (stated := request.profile.gpu.reserved) is not None:
        outside = dict(context_bytes=float(stated))
    software = replace(
        base,
        flash=int(uses_flash_attention(spec)),
        softmax_bytes=0.0 if spec.precision == "fp32" else SOFTMAX_BYTES,
        narrow_logits=int(abilities.model_classes == MEGATRON_CORE and spec.precision != "fp32"),
        overlaps_tensors=int(spec.engine.megatron.tp_comm_overlap),
        overlaps_gradients=int(spec.optimizer.overlap_grad_reduce),
        overlaps_parameters=int(spec.optimizer.overlap_param_gather),
        overlaps_experts=0,
        late_sums=int(abilities.sums_behind_pipeline),
        scatter_gather=float(abilities.splits_stage_messages),
        main_bytes=main * copied + (MOMENT_BYTES - _saved_state(spec)) * trainable,
        # PyTorch's allocator has no expandable segments on AMD's GPUs
        slack=FRAGMENTED if (request.generation or "").startswith("cdna") else base.slack,
        bucket_bytes=bucket_bytes(spec),
        **outside,
    )
    if knowledge is not None:
        software = _with_options(software, spec, knowledge.calibration)
    if spec.engine.megatron.cross_entropy_loss_fusion:
        software = replace(software, loss_bytes=FUSED_LOSS_BYTES)
    return replace(software, **eager(spec))


def _saved_state(spec: RunSpec) -> float:
    """Compute by how much the state of a weight is smaller than AdamW's in fp32, in the mean.

    Muon has one moment of a matrix (torch/optim/_muon.py, momentum_buffer).
    """
    saved: float = saved_state_bytes(spec)
    if spec.optimizer.kind == "muon":
        saved += MOMENT_BYTES / 2 * matrix_parameters(spec.model) / total_parameters(spec.model)
    return saved


def bucket_bytes(spec: RunSpec) -> float:
    """Compute the blocks in which DeepSpeed sums gradients: one, at stages 1 and 2 two to overlap.

    They are besides the gradients (runtime/zero/stage_1_and_2.py, ipg_buffer; stage3.py,
    __ipg_bucket_flat_buffer); buckets of other engines are parts of them.
    """
    optimizer, own = spec.optimizer, spec.engine.deepspeed
    if 1 not in spec.engine.abilities.bucket_stages or optimizer.zero == 0:
        return 0.0
    two = optimizer.overlap_grad_reduce and optimizer.zero != 3
    return float((2 if two else 1) * int(own.reduce_bucket))


def _with_options(software: Software, spec: RunSpec, calibration: Calibration) -> Software:
    """Apply dispatcher, shared expert and CUDA graphs of `engine.megatron`.

    Graphs leave experts out, whose sizes the host has to read.
    """
    own = spec.engine.megatron
    flexible = own.moe_token_dispatcher_type == "flex"
    dispatcher = own.moe_flex_dispatcher_backend if flexible else "alltoall"
    dispatch = calibration.dispatch[dispatcher]
    graphs = calibration.graphs["none" if own.cuda_graph_impl == "none" else "layer"]
    return replace(
        software,
        one_copy=dispatch.one_copy,
        dispatch_efficiency=dispatch.efficiency,
        shared_overlap=int(own.moe_shared_expert_overlap),
        launched_layers=graphs.layers,
        launched_experts=graphs.experts,
    )


def uses_flash_attention(spec: RunSpec) -> bool:
    """Tell whether Megatron computes attention without s x s tensors; fp32 has no flash kernel.

    `spec` is that of a `PlanRequest`, where `auto` is resolved.
    """
    has_kernel = spec.engine.implementation != "local" and spec.precision != "fp32"
    has_kernel = has_kernel and spec.engine.megatron.attention_backend != "unfused"
    return has_kernel and spec.model.takes_fused_attention()


def _nothing(record: type) -> dict[str, float]:
    """Return 0 for every field without a default."""
    return {field.name: 0.0 for field in fields(record) if field.default is MISSING}


PLAIN = Software(**_nothing(Software))
NO_MACHINE = Machine(**{name: 1.0 for name in _nothing(Machine)})


# -- Count the bytes that move to add the weight gradients of a microbatch to those before ------


def added_bytes(
    way: GradientAddition, gradient_bytes: float, kept_bytes: float, accumulation: Array
) -> Array:
    """Bytes per weight and microbatch, besides the gradient that its product writes.

    `gradient_bytes` has that product's result, `kept_bytes` what is added to and reduced. The
    first of `accumulation` microbatches has nothing to add to.
    """
    if way == "product":
        return 0.0
    if way == "main":
        return gradient_bytes + 2 * kept_bytes
    if way == "autograd":
        return 3 * kept_bytes * (1 - 1 / np.asarray(accumulation))
    copied = gradient_bytes + kept_bytes
    if way == "block":
        return copied
    changed = copied if kept_bytes != gradient_bytes else 0.0
    return 2 * gradient_bytes + changed + 2 * kept_bytes


# -- What Hugging Face's classes keep and move in memory where Megatron's fused kernels do not --
# Read off transformers' models and torch's operations, and compared with what their forward and
# backward passes hold (tests/engines/test_kept_activations.py).


# Per logit, in fp32 whatever the precision: log-probabilities, their gradient, and that of the
# logits (train/engines/models/tasks.py, masked_sum; torch/_decomp: _log_softmax_backward_data).
_LOGIT_BYTES = 12.0
# Where ranks share them, the bf16 ones are still there beside three of fp32: themselves, less their
# maximum, and exponentials (deepspeed/sequence/cross_entropy.py, _VocabParallelCrossEntropy).
_SPLIT_BYTES = 2.0
# x / rms(x) in fp32 (modeling_llama.py, LlamaRMSNorm), which its product with the weight keeps.
_RMS_BYTES = 4.0
# Its operations one by one (a cast, the square, its mean, two products, a cast back) move 36 bytes
# per element forward and 76 backward, where one fused kernel moves 4 and 6 of 16 bits. Without the
# casts, in fp32, 28 and 64 instead of 8 and 12.
EAGER_NORM_TRAFFIC = (36 + 76) / (4 + 6)
_WIDE_NORM_TRAFFIC = (28 + 64) / (8 + 12)
# torch.autocast leaves what is added up between blocks in fp32, where bf16 was counted.
_STREAM_BYTES = 2.0
# T5's norm keeps its input besides (modeling_t5.py, T5LayerNorm), and its `gelu_new` is made of
# single operations, of which three more results wait (activations.py, NewGELUActivation).
_T5_NORM_BYTES, _T5_GATE_COPIES = 2.0, 3.0
# It makes a bf16 copy of its input for each product: of queries, keys and values, of gate and up.
_COPY_BYTES = 2.0


def eager(spec: RunSpec) -> dict[str, float]:
    """Return fields of `Software` for an engine that trains these classes; empty for others.

    Attention is torch's fused kernel in any precision. `norm_bytes` is per element of a block's
    input, in the mean of an attention and an MLP block. With autocast (DDP in bf16) weights stay
    in fp32 and each operation chooses its precision.
    """
    model, abilities = spec.model, spec.engine.abilities
    if abilities.model_classes != TRANSFORMERS or model.family == "resnet":
        return {}
    apart = model.norm == "rmsnorm"  # operations of their own: LayerNorm is one kernel of PyTorch's
    norm_bytes = _RMS_BYTES if apart else 0.0
    traffic = _WIDE_NORM_TRAFFIC if spec.precision == "fp32" else EAGER_NORM_TRAFFIC
    if abilities.autocast and spec.precision == "bf16":
        # GPT-2 has one matrix for queries, keys and values
        attention_products = 1 if model.family == "gpt" else 3
        copies = (attention_products - 1 + int(model.gated)) / 2
        norm_bytes += _STREAM_BYTES + _COPY_BYTES * copies
    gate_copies = 1.0
    if model.positions == "relative":
        norm_bytes += _T5_NORM_BYTES
        gate_copies += _T5_GATE_COPIES * (model.activation == "geglu_tanh")
    return dict(
        flash=float(model.takes_fused_attention(pads=True)),
        gate_copy=gate_copies,
        logit_bytes=_LOGIT_BYTES,
        split_logit_bytes=0.0 if spec.precision == "fp32" else _SPLIT_BYTES,
        loss_first=1.0,
        norm_bytes=norm_bytes,
        norm_traffic=traffic if apart else 1.0,
    )
