"""The measured efficiency of inference, per GPU and per engine.

Belongs here: the document behind `catalogue/serving.yaml`. Does not belong here: reading the file
(see `spec.loader`), fitting the figures (`bench/calibrate_serving.py`), the formulas that use them
(`hpctrain.serve.plan`), training's constants (`spec.calibration`).
"""

from __future__ import annotations

from pydantic import Field

from hpctrain.spec.calibration import Factor, Seconds, Share
from hpctrain.spec.document import Document


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
