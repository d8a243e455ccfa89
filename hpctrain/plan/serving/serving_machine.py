"""Choose the constants of one GPU and one engine for the formulas of serving.

Belongs here: data sheets times calibrated shares. Does not belong here: their values
(`catalogue/serving.yaml`), reading that file, formulas (`step_time`, `kv_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hpctrain.plan.cost.case import Array, Machine, stack
from hpctrain.plan.cost.constants import calibration_of, machine_of, peak_rate
from hpctrain.spec.calibration import Calibration, FabricCalibration
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.serving_calibration import ServingCalibration


@dataclass(frozen=True)
class ServingMachine:
    """A GPU with its links and the shares of the data sheet that inference reaches."""

    links: Machine  # NVLink and network, as in the training cost model
    memory: Array  # bytes
    memory_bandwidth: Array  # bytes/s
    peak_16: Array  # dense FLOP/s with 16-bit operands
    peak_8: Array
    peak_4: Array
    product_16: Array  # shares of these peaks that large products reach
    product_8: Array
    product_blocks: Array  # 8-bit operands with a scale for each block of 128 x 128
    product_4: Array
    attention_share: Array  # of `peak_16`: attention of prompts
    stream_16: Array  # of `memory_bandwidth`: reading weights of 16-bit products
    stream_8: Array
    stream_4: Array
    stream_expanded: Array  # the same of 4-bit weights that are expanded to 16 bits
    grouped_16: Array  # the same four for the weights of experts
    grouped_8: Array
    grouped_4: Array
    grouped_expanded: Array
    grouped_product: Array  # of `product_*`: grouped products of experts
    cache_stream: Array  # of `memory_bandwidth`: reading the KV cache
    block_pace: Array  # seconds of a block's kernels at least, relative to Hopper
    message_share: Array  # of the NVLink bandwidth: all-reduces
    message_pace: Array  # seconds of a message at least, relative to Hopper


@dataclass(frozen=True)
class EngineConstants:
    """What an engine adds to the GPU's work, and how it fills its iterations."""

    iteration_seconds: Array  # scheduler, sampling, copies: per iteration
    sequence_seconds: Array  # the same per decoding sequence
    request_seconds: Array  # of a request's first token: HTTP, first answer
    token_seconds: Array  # the same per token of the prompt: tokeniser, copies
    waited_iterations: Array  # between a request's arrival and its first token, seen by the client
    product_speed: Array  # of its products over the best for that GPU
    attention_seconds: Array  # an attention block's kernels at least
    latent_seconds: Array  # the same of latent attention
    indexer_seconds: Array  # what choosing keys adds to that (sparse attention)
    recurrent_seconds: Array  # the same of linear attention
    mlp_seconds: Array  # a dense MLP's kernels at least
    expert_seconds: Array  # a MoE block's kernels at least
    message_seconds: Array  # an all-reduce between two GPUs at least
    message_hop_seconds: Array  # the same per doubling of GPUs
    expanded_speed: Array  # of its kernels for expanded weights of experts, over the best
    expert_variety: Array  # independent choices of experts per token (1: tokens choose alone)
    expert_imbalance: Array  # rows of the busiest rank's experts over the mean
    scaling_seconds: Array  # what operands with a scale per block of 128 add to the least times
    eager_factor: Array  # launching kernels one by one (no CUDA graph) over their least times
    handover_seconds: Array  # of a request between a prefill and a decode replica
    draft_acceptance: Array  # chance that a drafted token is kept, if those before it were
    token_budget: Array  # tokens of one iteration at most
    max_sequences: Array  # sequences in service at most, per attention data parallel rank
    reserved_output: Array  # share of its output that a sequence's cache is counted with
    memory_share: Array  # of the GPU's memory that the engine takes
    overhead_bytes: Array  # per GPU: context, workspaces, CUDA graphs
    activation_copies: Array  # tensors [token budget, hidden] alive at the peak
    bunched_prompts: Array  # prompts that stay together in closed loops (`steady_state`)
    prompts_first: Array  # 1: iterations of prompts go before those of decoding sequences


def serving_machine(
    gpu: Gpu,
    serving: ServingCalibration,
    training: Calibration,
    fabric: FabricCalibration,
) -> ServingMachine:
    """Describe a GPU for inference; a GPU without constants of its own takes its generation's."""
    shares = serving.gpu(gpu.name, gpu.generation)
    wide = peak_rate(gpu, "bf16")
    eight = float(gpu.peak.get("fp8", wide))
    return ServingMachine(
        links=machine_of(gpu, calibration_of(training, gpu), fabric),
        memory=float(gpu.memory),
        memory_bandwidth=float(gpu.memory_bandwidth),
        peak_16=wide,
        peak_8=eight,
        peak_4=float(gpu.peak.get("fp4", eight)),
        product_16=shares.product_16,
        product_8=shares.product_8,
        product_blocks=shares.product_blocks,
        product_4=shares.product_4,
        attention_share=shares.attention_share,
        stream_16=shares.stream_16,
        stream_8=shares.stream_8,
        stream_4=shares.stream_4,
        stream_expanded=shares.stream_expanded,
        grouped_16=shares.grouped_16,
        grouped_8=shares.grouped_8,
        grouped_4=shares.grouped_4,
        grouped_expanded=shares.grouped_expanded,
        grouped_product=shares.grouped_product,
        cache_stream=shares.cache_stream,
        block_pace=shares.block_pace,
        message_share=shares.message_share,
        message_pace=shares.message_pace,
    )


def engine_constants(serving: ServingCalibration, engine: str) -> EngineConstants:
    """Select the constants of an engine; an unknown one takes those of `other`."""
    chosen = serving.engine(engine)
    names = [field.name for field in fields(EngineConstants)]
    return EngineConstants(**{name: float(getattr(chosen, name)) for name in names})


def stack_machines(machines: Sequence[ServingMachine]) -> ServingMachine:
    """Stack machines into one whose fields are arrays of shape [len(machines)]."""
    links = stack([machine.links for machine in machines])
    flat = stack([replace(machine, links=0.0) for machine in machines])  # type: ignore[arg-type]
    return replace(flat, links=links)
