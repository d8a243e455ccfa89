"""The measured efficiency of kernels and links, per GPU and generation of software.

Belongs here: the documents behind `catalogue/calibration.yaml` and behind a site's own file. Does
not belong here: reading the files (see `spec.loader`), fitting the figures
(`bench/calibrate_planner.py`), measuring a site (`hpctrain.actions.calibrate`), the formulas that
use them (`hpctrain.plan.cost`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpctrain.spec.document import Document
from hpctrain.units import Bandwidth

Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(ge=0)]


class GpuCalibration(Document):
    """One kind of GPU: shares of its data sheet."""

    product_efficiency: Share = Field(description="Of the 16-bit peak: large matrix products")
    fp8_efficiency: Share = Field(description="Of the 8-bit peak: large matrix products")
    fp4_efficiency: Share = Field(description="Of the 4-bit peak: large matrix products")
    flash_efficiency: Share = Field(description="Of the 16-bit peak: fused attention")
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
    pp_overlap: Share = Field(description="Share of pipeline traffic that hides")
    ep_overlap: Share = Field(description="Share of the experts' all-to-all that hides")
    scatter_gather: Share = Field(description="1: pipeline traffic split over tensor ranks")
    layer_overhead: Seconds = Field(description="Per layer, microbatch and pass")
    expert_overhead: Seconds = Field(description="Per MoE layer, microbatch and pass")
    step_overhead: Seconds = Field(description="Per step")
    straggling: Factor = Field(description="Extra share of a step per doubling of GPUs beyond 8")
    network_efficiency: Share = Field(description="Of the network cards' bandwidth")
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


class AttentionCalibration(Document):
    """One attention kernel, for software that lets its users choose."""

    flash: Share = Field(description="1: fused attention; 0: s x s matrices in memory")
    flash_speed: Factor = Field(description="Over the best kernel for that GPU")
    softmax_passes: Factor = Field(description="Trips of the s x s matrices through memory")


class DispatchCalibration(Document):
    """One way to send tokens to experts."""

    overlap: Share = Field(description="Share of the all-to-all that hides")


class Calibration(Document):
    """All constants; `gpus` by catalogue name or, where that is missing, by generation."""

    gpus: dict[str, GpuCalibration]
    software: dict[str, SoftwareCalibration]
    attention: dict[str, AttentionCalibration]
    dispatch: dict[str, DispatchCalibration] = Field(description="By Megatron's dispatcher names")
    graphs: dict[str, Factor] = Field(description="Launch overhead left by CUDA graphs, by scope")


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
    provenance: str = Field(min_length=3, description="When, on which nodes, by which measurement")
