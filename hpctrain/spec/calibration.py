"""The measured efficiency of kernels and links, per GPU and generation of software.

Belongs here: the documents behind `catalogue/calibration.yaml` and behind a site's own file. Does
not belong here: reading the files (see `spec.loader`), fitting the figures
(`bench/calibrate_planner.py`), measuring a site (`hpctrain.site.calibrate`), the formulas that
use them (`hpctrain.plan.cost`).
"""

from __future__ import annotations

import hashlib
from math import sqrt
from typing import Annotated

from pydantic import Field, model_validator

from hpctrain.base.units import Bandwidth
from hpctrain.spec.document import Document

# ----------------------------------------------------------------------------------------------
# How far the planner may be off on a site that it has not seen, and what own runs have taught.


Deviation = Annotated[float, Field(ge=0, le=3)]
# of what runs teach: e^5 is a factor of 150, and steps are refused beyond one of 3
Logarithm = Annotated[float, Field(ge=-5, le=5)]
Variance = Annotated[float, Field(ge=-25, le=25)]
_ROUNDED = 1e-4  # share of a covariance, which is written with six digits


class Doubt(Document):
    """The prior of one quantity: how much a site as a whole can be off, and each of its runs.

    `multipliers`: deviation of each multiplier between sites. `classes`: of a common factor on all
    runs of a site for which the planner knows less. `noise`: of what is left in a single
    configuration; `class_noise` adds to it by class; `layout_noise` of it is not shared by layouts
    of one model. `rest`: of what is left besides, and shared by configurations that are alike;
    `reach`: how many doublings apart those may be. `widening`: factor on the normal distribution's
    quantile, so that as many unseen rows lie inside as are promised; `learned_widening` the same
    once own runs have taught.
    """

    multipliers: dict[str, Deviation]
    classes: dict[str, Deviation] = Field({}, description="By reason why less is known")
    noise: Deviation
    class_noise: dict[str, Deviation] = Field({}, description="By reason why less is known")
    layout_noise: Deviation
    rest: Deviation = 0.0
    reach: float = Field(1.0, gt=0, le=20)
    widening: float = Field(1.0, gt=0, le=5)
    learned_widening: float = Field(1.0, gt=0, le=5)


class Uncertainty(Document):
    """Both priors, and the GPUs and networks whose constants were fitted to measurements.

    `other_network`: deviation of the multiplier `network` on a fabric that is not among them.
    """

    time: Doubt
    memory: Doubt
    measured_gpus: tuple[str, ...] = Field(description="By catalogue name")
    measured_fabrics: tuple[str, ...] = Field(description="As profiles call them")
    other_network: Deviation
    provenance: str = Field(min_length=3, description="What the figures were fitted to")


class RunOrigin(Document):
    """What a measurement of steps is from: which run, when, where, with which software."""

    run: str = Field(min_length=1, description="Its id, or the name of a job of `make gpu`")
    day: str = Field(description="Of its last step, UTC: 2026-11-26")
    nodes: tuple[str, ...] = Field((), description="On which it ran")
    steps: int = Field(ge=1, description="That were counted")
    hpctrain: str = Field("", description="Version that trained it")
    software: str = Field("", description="PyTorch, as its ranks found it")


class OwnRun(RunOrigin):
    """One run that a site has calibrated with: which one, when, where, with which software."""

    measured_seconds: float = Field(gt=0, description="Of a step, as measured")
    before_seconds: float = Field(gt=0, description="As planned without own runs")
    after_seconds: float = Field(gt=0, description="As planned with them")
    measured_bytes: float | None = Field(None, gt=0, description="Reserved on the fullest GPU")
    before_bytes: float | None = Field(None, gt=0, description="As planned without own runs")
    after_bytes: float | None = Field(None, gt=0, description="As planned with them")


class LearnedMultiplier(Document):
    """One multiplier as a factor on time or memory, and how sure it was before and is after.

    `before` and `after` are deviations of its logarithm: two sites in three are that near.
    """

    name: str
    factor: float
    before: float
    after: float


class LearnedRest(Document):
    """What runs have shown of what configurations that are alike err by together.

    `deviation`, `reach`: before any run, as packaged then. `places`: where the runs are, on `axes`
    (`hpctrain/plan/cost/multipliers.py`).
    """

    deviation: Deviation = Field(description="Of its logarithm before any run")
    reach: float = Field(gt=0, le=20, description="In doublings")
    axes: tuple[str, ...] = Field(description="What a place has a number for")
    places: tuple[tuple[float, ...], ...] = Field(description="A row for each of the last names")


class Learned(Document):
    """What is believed of one quantity's multipliers after the update; logarithms."""

    names: tuple[str, ...] = Field(
        description="Of the multipliers, then `like RUN` for each place (docs/certainty.md)"
    )
    mean: tuple[Logarithm, ...] = Field(description="Of the logarithm of each: 0 as packaged")
    covariance: tuple[tuple[Variance, ...], ...] = Field(description="Of these logarithms")
    noise_factor: float = Field(
        1.0, gt=0, description="Variance of this site's noise over the packaged one"
    )
    rest: LearnedRest | None = Field(None, description="Shared by configurations that are alike")

    @model_validator(mode="after")
    def _fits_together(self) -> Learned:
        size = len(self.names)
        if len(self.mean) != size or len(self.covariance) != size:
            raise ValueError("names, mean and covariance differ in length")
        if any(len(row) != size for row in self.covariance):
            raise ValueError("the covariance is not square")
        if len(set(self.names)) != size:
            raise ValueError("a name is there twice")
        if any(self.covariance[one][one] < 0 for one in range(size)):
            raise ValueError("the covariance has a negative variance")
        for one in range(size):
            for other in range(one):
                # Refuse a covariance that no two quantities can have. Raises ValueError
                value, mirrored = self.covariance[one][other], self.covariance[other][one]
                limit = sqrt(self.covariance[one][one] * self.covariance[other][other])
                if abs(value - mirrored) > _ROUNDED * limit:
                    raise ValueError(f"the covariance is not symmetric in row {one + 1}")
                if abs(value) > (1 + _ROUNDED) * limit:
                    raise ValueError(
                        f"the covariance in row {one + 1} exceeds what its variances allow"
                    )
        if self.rest is not None and any(
            len(place) != len(self.rest.axes) for place in self.rest.places
        ):
            raise ValueError("a place has not as many numbers as there are axes")
        return self

    @property
    def multipliers(self) -> tuple[str, ...]:
        """The names without those of places, which are the last ones."""
        return self.names[: len(self.names) - len(self.rest.places if self.rest else ())]


class SiteLearning(Document):
    """What the runs of one engine on one cluster have taught; `hpctrain calibrate RUN ...`."""

    time: Learned = Field(description="Of the seconds of a step")
    memory: Learned | None = Field(None, description="Of the bytes of the fullest GPU")
    runs: tuple[OwnRun, ...] = Field(min_length=1, description="From which it was learned")
    error: Deviation = Field(
        description="Half the width of the 68 % interval of the next step time: 0.03 is 3 %"
    )
    constants: str = Field(
        min_length=8,
        description="Digest of the constants that are corrected: with others it is left aside",
    )


# ----------------------------------------------------------------------------------------------


Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(ge=0)]

# Fused attention's forward pass over its backward pass, heads of 128: FlashAttention-2 on A100
# (arXiv 2307.08691, figures 5 and 6) 224 and 196 TFLOP/s, FlashAttention-3 on H100 (arXiv
# 2407.08608, figures 5 and 6) 648 and 561.
FORWARD_RATIO = 1.15
# Keys at which it reaches half its rate, from FlashAttention-3 on H100 (figure 5): 467 TFLOP/s at
# 512 and 648 at 16k for heads of 128; causal, heads of 64, 197 and 473.
HALF_LENGTH, HALF_LENGTH_CAUSAL = 150.0, 550.0


class GpuCalibration(Document):
    """One kind of GPU: shares of its data sheet."""

    product_efficiency: Share = Field(description="Of the 16-bit peak: large matrix products")
    fp8_efficiency: Share = Field(description="Of the 8-bit peak: large matrix products")
    fp4_efficiency: Share = Field(description="Of the 4-bit peak: large matrix products")
    flash_efficiency: Share = Field(
        description="Of the 16-bit peak: fused causal attention, both passes, heads of 128"
    )
    half_head: Factor = Field(
        description="Head size whose products take as long as the exponentials of attention"
    )
    batched_efficiency: Share = Field(description="Of the 16-bit peak: unfused attention")
    scan_efficiency: Share = Field(description="Of the 16-bit peak: scan of Mamba-2 blocks")
    memory_efficiency: Share = Field(description="Of the memory bandwidth: elementwise kernels")
    nvlink_efficiency: Share = Field(description="Of the NVLink bandwidth: rings")
    tail_products: Factor = Field(
        description="Size m x n of a product that fills half a wave of tiles"
    )
    misaligned_cost: Factor = Field(
        description="Slow-down of batched products with a head size that is no multiple of 8"
    )
    provenance: str = Field(min_length=3, description="What the figures were fitted to")


class SoftwareCalibration(Document):
    """One generation of training software on its clusters."""

    description: str = Field(min_length=3, description="Which software this is")
    flash: Share = Field(description="1: fused attention; 0: s x s matrices in memory")
    flash_speed: Factor = Field(description="Of its attention kernel over the best for that GPU")
    softmax_passes: Factor = Field(description="Trips of the s x s matrices through memory")
    streaming: Factor = Field(description="Traffic of elementwise kernels over the fused minimum")
    tp_overlap: Share = Field(description="Share of tensor parallel traffic that hides")
    dp_overlap: Share = Field(description="Share of data parallel traffic that can hide")
    pp_overlap: Share = Field(description="Share of traffic between chunks of a stage that hides")
    ep_overlap: Share = Field(description="Share of the experts' all-to-all that hides, if any")
    sharding_efficiency: Share = Field(description="Of the links, of shards of ZeRO-2 and 3")
    scatter_gather: Share = Field(description="1: pipeline traffic split over tensor ranks")
    beside_weights: Share = Field(
        description="1: tensor parallel reductions of the backward pass run beside the products of "
        "weight gradients"
    )
    layer_overhead: Seconds = Field(description="The host launches one layer's pass in it")
    expert_overhead: Seconds = Field(description="It launches one expert's pass in it")
    step_overhead: Seconds = Field(description="Per step")
    fused_loss: Share = Field(description="1: fused cross entropy")
    gradient_bytes: Factor = Field(description="Per parameter, where the spec does not say")
    main_bytes: Factor = Field(description="Optimizer state per parameter")
    dummy_gradients: Share = Field(description="1: one layer's weight gradients in 16 bits remain")
    norm_bytes: Factor = Field(description="Per element that a norm keeps beyond its input")
    checkpoint_copies: Factor = Field(description="Tensors that a fully recomputed layer keeps")
    logit_bytes: Factor = Field(description="Per logit at the peak")
    slack: Factor = Field(description="Allocator's factor on activations and buffers")
    context_bytes: Factor = Field(description="Outside the allocator: CUDA context, NCCL")
    provenance: str = Field(min_length=3, description="What the figures were fitted to")


class FabricCalibration(Document):
    """One kind of network between nodes, with the machines that come with it."""

    network_efficiency: Share = Field(description="Of the network cards' bandwidth")
    straggling: Factor = Field(description="Deviation of the ranks' step times, share of a step")
    provenance: str = Field(min_length=3, description="What the figures were fitted to")


class AttentionCalibration(Document):
    """One attention kernel, for software that lets its users choose."""

    flash: Share = Field(description="1: fused attention; 0: s x s matrices in memory")
    flash_speed: Factor = Field(description="Over the best kernel for that GPU, to Ampere")
    newer_speed: Factor = Field(description="The same from Hopper on")
    softmax_passes: Factor = Field(description="Trips of the s x s matrices through memory")


class DispatchCalibration(Document):
    """One way to send tokens to experts."""

    efficiency: Share = Field(description="Of the links that the messages take")
    one_copy: Share = Field(description="1: one copy of a token to each node or rank; 0: top_k")


class GraphCalibration(Document):
    """What CUDA graphs of one scope leave of the host's launches."""

    layers: Share = Field(description="Of those of layers")
    experts: Share = Field(description="Of those of experts")


class Calibration(Document):
    """All constants; `gpus` by catalogue name or, where that is missing, by generation."""

    gpus: dict[str, GpuCalibration]
    fabrics: dict[str, FabricCalibration] = Field(
        description="By `network.fabric` of profiles, or by the name of a published cluster"
    )
    software: dict[str, SoftwareCalibration]
    attention: dict[str, AttentionCalibration]
    dispatch: dict[str, DispatchCalibration] = Field(description="By Megatron's dispatcher names")
    graphs: dict[str, GraphCalibration] = Field(description="By scope: none, layer or full")


class SiteServingCalibration(Document):
    """What one engine took here over what was predicted; `hpctrain calibrate SERVICE` measures it.

    `error` is the standard deviation of the logarithm of measured over corrected seconds: plans
    keep that much room.
    """

    decode_factor: float = Field(gt=0, le=100, description="On iterations without prompts")
    prompt_factor: float = Field(gt=0, le=100, description="On what prompts add to iterations")
    request_seconds: Seconds | None = Field(
        None, description="Of a request outside of iterations: HTTP, tokeniser, router"
    )
    error: Share = Field(description="What is left: deviation of the logarithm")
    provenance: str = Field(min_length=3, description="Which service, when, how many answers")


# Rates that are measured one by one, and the multiplier of the cost model that each settles.
RATE_MULTIPLIERS = {
    "product_efficiency": "products",
    "flash_efficiency": "attention",
    "memory_efficiency": "elementwise",
    "nvlink_bandwidth": "nvlink",
    "network_bandwidth": "network",
}


class SiteCalibration(Document):
    """What was measured on one cluster, in place of the packaged figures; absent: those stay.

    A profile names this file in `calibration`; `hpctrain calibrate` writes it.
    """

    gpu: str = Field(min_length=1, description="GPU that was measured, by its catalogue name")
    product_efficiency: Share | None = Field(
        None, gt=0, description="Of the 16-bit peak: large matrix products"
    )
    flash_efficiency: Share | None = Field(
        None, gt=0, description="Of the 16-bit peak: fused attention"
    )
    memory_efficiency: Share | None = Field(
        None, gt=0, description="Of the memory bandwidth: elementwise kernels"
    )
    nvlink_bandwidth: Bandwidth | None = Field(
        None, gt=0, description="Per GPU in a ring inside the NVLink domain"
    )
    network_bandwidth: Bandwidth | None = Field(
        None, gt=0, description="Per GPU while all cards of its node are busy"
    )
    serving: dict[str, SiteServingCalibration] = Field(
        {}, description="By engine (vllm, ...): what services took over what was predicted"
    )
    learned: dict[str, SiteLearning] = Field(
        {}, description="By engine: what runs of this cluster have taught (docs/certainty.md)"
    )
    provenance: str = Field(min_length=3, description="When, on which nodes, by which measurement")


def measured_rates(site: SiteCalibration) -> tuple[str, ...]:
    """List the multipliers whose rates a cluster has measured one by one."""
    fields = RATE_MULTIPLIERS.items()
    return tuple(name for field, name in fields if getattr(site, field) is not None)


def constants_digest(calibration: Calibration) -> str:
    """Compute which constants runs have corrected: with other ones the correction is wrong."""
    return hashlib.sha256(calibration.model_dump_json().encode()).hexdigest()[:16]


# -- The measured efficiency of inference, per GPU and per engine -------------------------------


class ServingGpuCalibration(Document):
    """One kind of GPU: shares of its data sheet that inference reaches."""

    product_16: Share = Field(description="Of the 16-bit peak: products of prompts")
    product_8: Share = Field(description="Of the 8-bit peak: products of prompts")
    product_blocks: Share = Field(description="Of the 8-bit peak: weights scaled in blocks")
    product_4: Share = Field(description="Of the 4-bit peak: products of prompts")
    attention_share: Share = Field(description="Of the 16-bit peak: attention of prompts")
    stream_16: Share = Field(description="Of the memory bandwidth: weights of 16-bit products")
    stream_8: Share = Field(description="Of the memory bandwidth: weights of 8-bit products")
    stream_4: Share = Field(description="Of the memory bandwidth: weights of 4-bit products")
    stream_expanded: Share = Field(description="Of it: 4-bit weights expanded to 16 bits")
    grouped_16: Share = Field(description="The same of experts: 16-bit products")
    grouped_8: Share = Field(description="The same of experts: 8-bit products")
    grouped_4: Share = Field(description="The same of experts: 4-bit products")
    grouped_expanded: Share = Field(description="The same of experts: expanded weights")
    grouped_product: Factor = Field(description="Of the products' shares: products of experts")
    cache_stream: Share = Field(description="Of the memory bandwidth: reading the KV cache")
    block_pace: Factor = Field(description="Least time of a block's kernels over Hopper's")
    message_share: Share = Field(description="Of the NVLink bandwidth: all-reduces")
    message_pace: Factor = Field(description="Least time of a message over Hopper's")
    provenance: str = Field(min_length=3, description="What the figures were fitted to")


class ServingEngineCalibration(Document):
    """One engine: what it adds to the GPU's work, and how it fills its iterations."""

    iteration_seconds: Seconds = Field(description="Per iteration: scheduler, sampling, copies")
    sequence_seconds: Seconds = Field(description="Per iteration and decoding sequence")
    request_seconds: Seconds = Field(description="Per request before and behind its first token")
    token_seconds: Seconds = Field(description="Per token of the prompt: tokenizer, copies")
    waited_iterations: Factor = Field(
        description="From a request's arrival to its first token at the client, beside its prompt's"
    )
    product_speed: Factor = Field(description="Of its products over the best for that GPU")
    attention_seconds: Seconds = Field(description="Least time of an attention block's kernels")
    latent_seconds: Seconds = Field(description="Least time of a latent attention block's kernels")
    indexer_seconds: Seconds = Field(description="What choosing keys adds (sparse attention)")
    recurrent_seconds: Seconds = Field(
        description="Least time of a linear attention block's kernels"
    )
    mlp_seconds: Seconds = Field(description="Least time of a dense MLP's kernels")
    expert_seconds: Seconds = Field(description="Least time of a MoE block's kernels")
    message_seconds: Seconds = Field(description="Least time of an all-reduce of two GPUs")
    message_hop_seconds: Seconds = Field(description="What each doubling of GPUs adds to that")
    expanded_speed: Factor = Field(description="Of kernels for expanded experts, over the best")
    expert_variety: Share = Field(
        description="Independent choices of experts per token; below 1: tokens choose alike"
    )
    expert_imbalance: Factor = Field(description="Rows of the busiest rank's experts over the mean")
    scaling_seconds: Seconds = Field(
        description="What 8-bit operands with a scale per block add to a block's least time"
    )
    eager_factor: Factor = Field(
        description="Launching kernels one by one (no CUDA graph) over least times"
    )
    handover_seconds: Seconds = Field(description="Of a request between prefill and decode replica")
    draft_acceptance: Share = Field(description="Chance that a drafted token is kept")
    token_budget: Factor = Field(gt=0, description="Tokens of one iteration at most")
    max_sequences: Factor = Field(gt=0, description="Sequences at most, per rank of attention")
    reserved_output: Share = Field(description="Of an answer: what counts when room is given")
    memory_share: Share = Field(description="Of the GPU's memory that the engine takes")
    overhead_bytes: Factor = Field(description="Per GPU: CUDA context, workspaces, CUDA graphs")
    activation_copies: Factor = Field(description="Tensors [budget, hidden] alive at the peak")
    bunched_prompts: Factor = Field(
        description="Prompts that stay together in closed loops of equal lengths"
    )
    prompts_first: Share = Field(
        description="1: prompts are computed alone, before decoding goes on; 0: beside it"
    )
    provenance: str = Field(min_length=3, description="What the figures were fitted to")
    unseen_error: Share = Field(
        description="Of TPOT that no fit has seen: deviation of the logarithm"
    )
    unseen_provenance: str = Field(min_length=3, description="Which rows that was measured on")


class ServingCalibration(Document):
    """All constants; `gpus` by catalogue name or generation, `engines` by name; `other` for all."""

    gpus: dict[str, ServingGpuCalibration]
    engines: dict[str, ServingEngineCalibration]

    def gpu(self, name: str, generation: str) -> ServingGpuCalibration:
        """Select the constants of a GPU, else of its generation, else of `other`."""
        for key in (name, generation):
            if key in self.gpus:
                return self.gpus[key]
        return self.gpus["other"]

    def engine(self, name: str) -> ServingEngineCalibration:
        """Select the constants of an engine, else of `other`."""
        return self.engines.get(name, self.engines["other"])
