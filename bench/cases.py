"""From a published row to a case of the cost model, with every assumption named.

Belongs here: the rules that fill what a table leaves blank, and which generation of software a
framework name means. Does not belong here: reading the table (`published`), shapes of models
(`published_models`), constants (`catalogue/calibration.yaml`) or formulas (`hpctrain.plan.cost`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from bench.memory_facts import BF16_ACCUMULATOR, copied_gradient_bytes, with_memory_facts
from bench.pipeline_layout import stage_layers
from bench.published import PublishedRow, facts_of, precision_of
from bench.published_models import ModelShape, UnknownModel, model_of
from bench.published_recipes import Recipe, product_names, recipe_of
from hpctrain.plan.cost.case import (
    RECOMPUTE_FULL,
    RECOMPUTE_NONE,
    RECOMPUTE_SELECTIVE,
    Array,
    Case,
    Machine,
    Mesh,
    Shape,
    Software,
)
from hpctrain.plan.cost.from_spec import (
    EAGER_NORM_TRAFFIC,
    added_bytes,
    calibration_of,
    machine_of,
    newer,
    software_name,
    software_of,
)
from hpctrain.plan.mesh.candidate import MODULES
from hpctrain.plan.model.number_formats import LAYOUT_BYTES
from hpctrain.spec.calibration import Calibration, SoftwareCalibration
from hpctrain.spec.catalogue import Gpu, GpuCatalogue, match_gpu
from hpctrain.spec.engines.registry import abilities_of


class CannotModel(ValueError):
    """A row that does not determine a case; the message says what is missing."""


@dataclass(frozen=True)
class RowCase:
    """One row as a case. `assumed` names what no column and no note gave."""

    row: PublishedRow
    case: Case
    gpu: Gpu
    software: str
    attention: str | None
    dispatcher: str | None
    overlapped_experts: bool
    graphs: str
    unfused_norms: bool
    assumed: tuple[str, ...]


MODERN = "megatron-core"
# (regular expression over source and framework, key of calibration.yaml); the first match counts
SOFTWARE = (
    (r"zero-?3.*no mp", "deepspeed-zero3-2021"),
    (r"narayanan|ptd-p|sc21", "megatron-2021"),
    (r"bloom|megatron-deepspeed|mt-nlg|turing-nlg|deepspeed-azure", "megatron-deepspeed"),
    (r"aleph alpha", "scaling"),
    (r"llm-foundry|composer|mosaic|fsdp|torchtitan|automodel", "fsdp"),
    (r"zero.?bubble|schedule (zb|1f1b|v-)", "megatron-2023"),
    (r"korthikanti|megatron.*2022|selective", "megatron-2022"),
    (r"simumax|memory_speed|functional test|bridge|modelzoo", MODERN),
    (r"nemo|dgxc|mlperf|megatron readme|megatron-core|mcore", MODERN),
    (r"deepspeed|zero", "deepspeed"),
)


def software_key(row: PublishedRow) -> tuple[str, bool]:
    """(key, True when it was guessed)."""
    text = product_names(f"{row.source} {row.framework}").lower()
    for pattern, key in SOFTWARE:
        if re.search(pattern, text):
            return key, False
    return MODERN, True


def memory_key(key: str, recipe: Recipe) -> str:
    """Which entry of `software` says what is in memory."""
    return f"{key}-unfused-norms" if key == "scaling" and not recipe.rms_kernel else key


def product_software(recipe: Recipe, calibration: Calibration) -> tuple[str, Calibration]:
    """Which entry of `software` `hpctrain plan` takes for such a run, whoever measured it.

    A run whose attention is not TransformerEngine's has layers without it, and one that says which
    kernel its norms are has layers that its authors put together. What is in memory is another
    thing: that of the framework which the row names (`memory_facts`). The rest is what
    `plan.cost.from_spec` sets for a spec.
    """
    named, local = recipe.rms_kernel is not None, recipe.attention != "te"
    key = software_name(recipe.engine, eager=named, local=local)
    own = "megatron" if recipe.engine == "megatron-fsdp" else recipe.engine
    given = {"scatter_gather": float(abilities_of(own).splits_stage_messages)}
    known = {**calibration.software, key: calibration.software[key].model_copy(update=given)}
    return key, calibration.model_copy(update={"software": known})


def row_case(
    row: PublishedRow,
    catalogue: GpuCatalogue,
    calibration: Calibration,
    product: bool = False,
) -> RowCase:
    """The case of one row, with `product` on the software that `hpctrain plan` takes for any run.

    Raises CannotModel.
    """
    try:
        model = model_of(row)
    except UnknownModel as error:
        raise CannotModel(f"model `{row.model}`: {error}") from None
    if model.family in ("t5", "resnet"):
        raise CannotModel(f"model `{row.model}`: family {model.family} is not modelled")
    gpu = match_gpu(catalogue, row.gpu)
    if gpu is None:
        raise CannotModel(f"GPU `{row.gpu}` is not in the catalogue")
    recipe = recipe_of(row)
    key, guessed = software_key(row)
    own = memory_key(key, recipe)
    in_memory = calibration.software[own]
    if product:
        key, calibration = product_software(recipe, calibration)
    if not recipe.mtp:
        model = replace(model, mtp_layers=0)
    _check_experts(row, model)
    assumed = [f"software {key}"] if guessed and not product else []
    assumed += [*model.filled, *(name for name in recipe.filled if name not in model.filled)]
    software, kernel = software_for(recipe, calibration, key, gpu)
    return RowCase(
        row=row,
        case=Case(
            shape_of(model, position_rows(row, model)),
            mesh_of(row, model, recipe, in_memory, assumed),
            machine_for(row, gpu, calibration),
            with_memory_facts(software, own, in_memory, row, recipe),
        ),
        gpu=gpu,
        software=key,
        attention=kernel,
        dispatcher=recipe.dispatcher if model.moe else None,
        overlapped_experts=recipe.moe_overlap,
        graphs=recipe.graphs,
        unfused_norms=key == "scaling" and not recipe.rms_kernel,
        assumed=tuple(dict.fromkeys(assumed)),
    )


def _check_experts(row: PublishedRow, model: ModelShape) -> None:
    """Raises CannotModel where experts are divided that the model does not have."""
    ep, experts = int(row.ep or 1), model.moe.experts if model.moe else 0
    if ep > 1 and not experts:
        raise CannotModel(
            f"model `{row.model}`: ep {ep}, but neither columns, notes nor registry name experts"
        )
    if ep > 1 and experts % ep:
        raise CannotModel(f"model `{row.model}`: {experts} experts do not divide by ep {ep}")


def position_rows(row: PublishedRow, model: ModelShape) -> int:
    """Rows of a table of learned positions. BLOOM's trials, whose models are named by their size,
    have none: `--position-embedding-type alibi` (bigscience, train/tr11-176B-ml/*.slurm).
    """
    return model.seq if model.positions == "learned" and "bloom" not in row.source.lower() else 0


def shape_of(model: ModelShape, position_rows: int = 0) -> Shape:
    """The model as the cost model sees it, with so many rows of learned positions."""
    moe, mla, hybrid = model.moe, model.mla, model.hybrid
    dense = model.layers if moe is None else dense_layers(model)
    attention = hybrid.attention if hybrid else model.layers
    experts = hybrid.moe if hybrid else model.layers - dense
    window = model.window
    return Shape(
        layers=model.layers,
        hidden=model.hidden,
        seq=model.seq,
        vocab=model.vocab,
        attention_blocks=attention,
        heads=model.heads,
        kv_heads=model.heads if mla else model.kv_heads,
        qk_dim=mla.nope_dim + mla.rope_dim if mla else model.head_dim,
        value_dim=mla.value_dim if mla else model.head_dim,
        causal=int(model.causal),
        window=window.size if window else 0,
        window_share=_window_share(model),
        mla=int(mla is not None),
        q_rank=mla.q_rank if mla else 0,
        kv_rank=mla.kv_rank if mla else 0,
        rope_dim=mla.rope_dim if mla else 0,
        mlp_blocks=hybrid.mlp if hybrid else dense,
        dense_first=int(moe is not None and hybrid is None and moe.every == 1),
        ffn=model.ffn,
        gated=int(model.gated),
        moe_blocks=experts if moe else 0,
        experts=moe.experts if moe else 1,
        top_k=moe.top_k if moe else 1,
        expert_ffn=moe.ffn if moe else 0,
        expert_hidden=(moe.latent or model.hidden) if moe else model.hidden,
        shared_ffn=moe.shared_ffn if moe else 0,
        mamba_blocks=hybrid.mamba if hybrid else 0,
        mamba_inner=hybrid.heads * hybrid.head_dim if hybrid else 0,
        mamba_state=hybrid.state if hybrid else 0,
        mamba_groups=hybrid.groups if hybrid else 0,
        mamba_heads=hybrid.heads if hybrid else 0,
        mamba_chunk=hybrid.chunk if hybrid else 0,
        mtp_layers=model.mtp_layers,
        tied=int(model.tied),
        position_rows=position_rows,
        biased=int(model.bias),
        rope=int(model.positions == "rope"),
        rms_norm=int(model.norm == "rmsnorm"),
        dropout=0.1 if model.family == "gpt" and model.positions == "learned" else 0.0,
    )


def dense_layers(model: ModelShape) -> int:
    """Layers with a dense MLP: the first ones, and those between MoE layers."""
    assert model.moe is not None
    rest = model.layers - model.moe.dense_layers
    return model.moe.dense_layers + rest - math.ceil(rest / max(1, model.moe.every))


def _window_share(model: ModelShape) -> float:
    if model.window is None:
        return 0.0
    every = model.window.every
    return 1.0 if every == 0 else (every - 1) / every


def mesh_of(
    row: PublishedRow,
    model: ModelShape,
    recipe: Recipe,
    constants: SoftwareCalibration,
    assumed: list[str],
) -> Mesh:
    """Layout, batch and recomputation; blanks by the rules below, each noted in `assumed`.

    Raises CannotModel for sizes that contradict each other.
    """
    tp, pp, cp, ep = (_size(row, name, 1, assumed) for name in ("tp", "pp", "cp", "ep"))
    vp = _virtual(row, model, recipe, pp)
    gpus = row.gpus or tp * pp * cp * (row.dp or 1)
    dp = row.dp or max(1, gpus // (tp * pp * cp))
    if row.dp and row.tp and row.pp and tp * pp * cp * dp != gpus:
        layout = f"tp {tp}, pp {pp}, cp {cp} and dp {dp}"
        raise CannotModel(f"model `{row.model}`: {layout} are not the {gpus} GPUs of the row")
    ep = _expert_ranks(ep, tp * cp * dp, assumed)
    micro, accumulation = _batch(row, recipe, dp, assumed)
    first, middle, last = stage_layers(recipe.layout, model.layers, pp, recipe.equal_modules)
    element = 4 if recipe.precision in ("fp32", "tf32") else 2
    kept = _kept_bytes(row, recipe)
    modules = recipe.recompute_modules
    return Mesh(
        tp=tp,
        pp=pp,
        vpp=vp,
        cp=cp,
        ep=ep,
        dp=dp,
        micro_batch=micro,
        accumulation=accumulation,
        sequence_parallel=int(recipe.sequence_parallel and tp > 1),
        zero=recipe.zero,
        recompute=RECOMPUTE[recipe.recompute],
        full_layers=recipe.recompute_layers / vp,
        kept_on_host=recipe.offload_activation_layers,
        **{f"again_{name}": int(name in modules) for name in MODULES},
        layers_first=first,
        layers_middle=middle,
        layers_last=last,
        low=int(recipe.precision in ("fp8", "mxfp8", "nvfp4")),
        element_bytes=element,
        gradient_bytes=_gradient_bytes(row, recipe, constants),
        summed_bytes=4 if recipe.sum_dtype == "fp32" else kept,
        whole_sums=int(recipe.whole_sums),
        added_bytes=added_bytes(recipe.addition, element, kept, accumulation),
        gradient_copy=copied_gradient_bytes(software_key(row)[0], recipe.precision),
        gather_bytes=1 if recipe.fp8_params and recipe.precision != "mxfp8" else 2,
        low_bytes=_low_bytes(recipe),
        low_only=int(recipe.fp8_params),
        input_bytes=_low_bytes(recipe) / 2,  # TransformerEngine keeps one of two layouts
        # with delayed scaling attention's projection keeps 8 bits of its own
        projected_bytes=int((recipe.precision, recipe.fp8_granularity) == ("fp8", "delayed")),
        shard_gpus=dp * cp / recipe.shard_groups if recipe.shard_groups > 1 else 0,
    )


RECOMPUTE = {
    "none": RECOMPUTE_NONE,
    "selective": RECOMPUTE_SELECTIVE,
    "full": RECOMPUTE_FULL,
}


def _size(row: PublishedRow, name: str, default: int, assumed: list[str]) -> int:
    value = getattr(row, name)
    if value is None and name != "ep":
        assumed.append(name)
    return int(value or default)


def _expert_ranks(ep: int, ranks: int, assumed: list[str]) -> int:
    """Experts over at most the ranks of a stage; a table that prints more of them is misprinted."""
    if ep > ranks:
        assumed.append("ep")
    return min(ep, ranks)


def _virtual(row: PublishedRow, model: ModelShape, recipe: Recipe, pp: int) -> int:
    """1F1B-I of the Zero-Bubble paper has one layer per chunk (its section 5.1); Megatron-core's
    README rows of 2024 do not say and are taken with the finest split up to 8 that divides.
    """
    if pp == 1:
        return 1
    per_stage = math.ceil((model.layers + 2) / pp) if model.layers % pp else model.layers // pp
    if recipe.schedule == "interleaved" and not row.vp:
        return per_stage
    if row.vp is None and "readme" in row.source.lower() and model.layers % pp == 0:
        return max(d for d in range(1, 9) if per_stage % d == 0)
    return max(1, recipe.vp)


def _batch(row: PublishedRow, recipe: Recipe, dp: int, assumed: list[str]) -> tuple[float, float]:
    """(microbatch, accumulation). Blank microbatch: the recipe's, at most what there is.

    Without a pipeline up to 4: fewer, larger microbatches hide more of the data parallel traffic,
    and nothing but memory speaks against them.
    """
    share = max(1.0, (row.global_batch or dp) / dp)
    least = float(recipe.micro_batch or 1) if (row.pp or 1) > 1 else 4.0
    micro = row.micro_batch or min(least, share)
    if not row.global_batch:
        assumed.append("global_batch")
    return micro, max(1.0, share / micro)


def _gradient_bytes(row: PublishedRow, recipe: Recipe, constants: SoftwareCalibration) -> float:
    if "bloom" in row.source.lower():
        more = BF16_ACCUMULATOR if recipe.precision == "bf16" else 0.0
        return constants.gradient_bytes + more
    return _kept_bytes(row, recipe)


def _kept_bytes(row: PublishedRow, recipe: Recipe) -> int:
    """Bytes of the gradient that microbatches are added to, and that is reduced."""
    if (facts_of(row).mixed_precision or "").upper() == "PURE":
        return 2
    return 4 if recipe.grad_dtype == "fp32" or recipe.precision == "fp32" else 2


def _low_bytes(recipe: Recipe) -> float:
    """Bytes of both layouts of a weight in 8 or 4 bits; where fp8 does not say, one scale."""
    kind = {"delayed": "delayed", "block": "blockwise"}.get(recipe.fp8_granularity or "")
    names = {"fp8": kind or "tensorwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
    return 2 * LAYOUT_BYTES[names[recipe.precision]] if recipe.precision in names else 0.0


# Clusters that are not as the GPU's maker builds them: words of the source, key of `fabrics`.
CLUSTERS = ((r"bloom", "jean-zay"), (r"aleph alpha", "aleph-alpha"))


def fabric_key(row: PublishedRow) -> str:
    """The network of the row's cluster."""
    return next((key for words, key in CLUSTERS if re.search(words, row.source.lower())), USUAL)


USUAL = "infiniband"


def machine_for(row: PublishedRow, gpu: Gpu, calibration: Calibration) -> Machine:
    """A GPU of the row's cluster."""
    low = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "fp32": "fp32", "tf32": "bf16"}
    precision = low.get(precision_of(row), "bf16")
    shares, fabric = calibration_of(calibration, gpu), calibration.fabrics[fabric_key(row)]
    machine = machine_of(gpu, shares, fabric, precision=precision)
    domain = min(machine.domain, 64) if machine.domain > 8 else machine.domain
    return replace(machine, domain=domain)  # racks of 72 are used in powers of two


def _stage_split(recipe: Recipe, software: Software) -> Array:
    given = recipe.stage_split
    return software.scatter_gather if given is None else int(given)


def software_for(
    recipe: Recipe, calibration: Calibration, key: str, gpu: Gpu
) -> tuple[Software, str | None]:
    """The software of a row with what its recipe and notes say about it, and its kernel."""
    software = software_of(calibration.software[key])
    # rows whose memory shows that attention keeps its scores have an entry that says so
    assumed = recipe.attention if software.flash or recipe.attention != "flash1" else None
    kernel = assumed if assumed in calibration.attention else None
    if kernel is not None:
        own = calibration.attention[kernel]
        speed = own.newer_speed if newer(gpu) else own.flash_speed
        passes = own.softmax_passes
        software = replace(software, flash=own.flash, flash_speed=speed, softmax_passes=passes)
    if recipe.rms_kernel is False:
        software = replace(software, norm_traffic=EAGER_NORM_TRAFFIC)
    dispatch = calibration.dispatch[recipe.dispatcher if recipe.dispatcher else "alltoall"]
    graphs = calibration.graphs[recipe.graphs]
    return replace(
        software,
        zero_bubble={"zb-1p": 1, "zb-2p": 2}.get(recipe.schedule, 0),
        fused_loss=int(recipe.cross_entropy != "unfused"),
        overlaps_tensors=int(recipe.tp_overlap),
        overlaps_gradients=int(recipe.grad_overlap),
        overlaps_parameters=int(recipe.param_overlap),
        overlaps_stages=int(recipe.p2p_overlap),
        scatter_gather=_stage_split(recipe, software),
        overlaps_experts=int(recipe.moe_overlap),
        one_copy=dispatch.one_copy,
        dispatch_efficiency=dispatch.efficiency,
        launched_layers=graphs.layers,
        launched_experts=graphs.experts,
        known_sizes=int(recipe.capacity_factor > 0),
    ), kernel
