"""The measured efficiency of kernels and links, per GPU and generation of software.

Belongs here: the documents behind `catalogue/calibration.yaml` and behind a site's own file. Does
not belong here: reading the files (see `spec.loader`), fitting the figures
(`bench/calibrate_planner.py`), measuring a site (`hpctrain.site.calibrate`), the formulas that
use them (`hpctrain.plan.cost`).
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import Field

from hpctrain.base.units import Bandwidth
from hpctrain.spec.document import Document
from hpctrain.spec.uncertainty import SiteLearning

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
