"""The input of the cost formulas: model, layout, machine and software, for one case or many.

Belongs here: the records that the formulas of this package take. All fields broadcast against
each other: numbers, or arrays of shape [cases]. Flags are 0 or 1. Does not belong here: formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.mesh.axes import LayoutSettings

Array = float | NDArray[np.float64]  # operators treat both alike
Mask = bool | NDArray[np.bool_]
Floats = NDArray[np.float64]

RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL = 0, 1, 2


def flag(condition: Mask) -> Array:
    """Turn a condition into 0 or 1."""
    return np.asarray(condition, dtype=float)


@dataclass(frozen=True)
class Shape:
    """A model as the formulas see it. Counts of blocks are over the whole model.

    A transformer layer is an attention block followed by an MLP or MoE block; hybrids such as
    Nemotron-H have any mixture of blocks in `layers` layers.
    """

    layers: Array  # what pipeline stages are made of
    hidden: Array
    seq: Array
    vocab: Array  # before padding to `vocab_multiple` rows per rank
    attention_blocks: Array
    heads: Array
    kv_heads: Array
    qk_dim: Array  # head size of queries and keys
    value_dim: Array  # head size of values
    causal: Array = 1
    window: Array = 0  # tokens that a sliding window sees; 0: all
    window_share: Array = 0  # share of the attention blocks that have the window
    mla: Array = 0
    q_rank: Array = 0  # 0: no low-rank query projection
    kv_rank: Array = 0
    rope_dim: Array = 0  # MLA: part of qk_dim that carries positions
    key_seq: Array = 0  # tokens of which keys and values are; 0: `seq`
    score_gradients: Array = 0  # 1: positions that are added to scores are learned
    # `layers` that attend to what an encoder returns, of `written_seq` tokens; it has the other
    # blocks, of `seq` tokens, in so many layers besides
    decoder_blocks: Array = 0
    written_seq: Array = 0
    beside_layers: Array = 0
    mlp_blocks: Array = 0
    dense_first: Array = 0  # 1: the MLP blocks of a model with experts are its first layers
    ffn: Array = 0
    gated: Array = 0
    moe_blocks: Array = 0
    experts: Array = 1
    top_k: Array = 1
    expert_ffn: Array = 0
    expert_hidden: Array = 0  # width that experts take in; `hidden` but for latent MoE
    shared_ffn: Array = 0
    mamba_blocks: Array = 0
    mamba_inner: Array = 0  # width inside a Mamba-2 block
    mamba_state: Array = 0
    mamba_groups: Array = 0
    mamba_heads: Array = 0
    mamba_chunk: Array = 0  # tokens of a chunk of the scan
    mtp_layers: Array = 0
    tied: Array = 0
    position_rows: Array = 0  # of embeddings besides words: learned positions, BERT's segments
    biased: Array = 0
    rope: Array = 0
    rms_norm: Array = 0
    dropout: Array = 0
    vocab_multiple: Array = 128  # Megatron-LM, make_vocab_size_divisible_by
    adapters: Array = 0  # weights of LoRA's matrices in one layer
    adapter_rank: Array = 0
    trainable: Array = 1  # share of all weights with a gradient; below 1 the layers' own are frozen

    @property
    def mlp_width(self) -> Array:
        """Columns of the first MLP matrix per unit of ffn: 2 with a gate, else 1."""
        return 1 + self.gated


@dataclass(frozen=True)
class Mesh(LayoutSettings[Array]):
    """How a model is laid out; sizes of axes, batch split and what is saved or recomputed.

    `recompute` is RECOMPUTE_NONE, _SELECTIVE or _FULL; `offload` 1: optimizer state in host memory,
    2: on NVMe drives behind it.
    """

    dp: Array = 1
    accumulation: Array = 1
    layers_first: Array = 0  # transformer layers of the first, of a middle and of the last stage
    layers_middle: Array = 0
    layers_last: Array = 0
    full_share: Array = 1  # share of a stage's layers that RECOMPUTE_FULL covers
    full_layers: Array = 0  # layers of each chunk that it covers instead; 0: `full_share`
    kept_on_host: Array = 0  # layers whose activations wait in the host's memory
    # what RECOMPUTE_SELECTIVE computes again, by Megatron's names (`recompute_modules`)
    again_core_attn: Array = 1  # core attention,
    again_mlp: Array = 0  # dense MLPs,
    again_moe: Array = 0  # MoE blocks, messages included,
    again_moe_act: Array = 0  # activation functions of experts,
    again_layernorm: Array = 0  # norms,
    again_mla_up_proj: Array = 0  # up-projections of latent attention
    pipeline_outside: Array = 1  # 1: pp is the farthest axis, 0: dp is
    low: Array = 0  # 1: matrix products of linear layers in 8 or 4 bits
    element_bytes: Array = 2
    gradient_bytes: Array = 4
    summed_bytes: Array = 0  # per gradient that is sent to be summed; 0: as `gradient_bytes`
    summed_inside: Array = 0  # the same inside a node, where that is more
    whole_sums: Array = 0  # 1: all ranks get all sums, though each keeps a shard of the state
    # moved per weight and microbatch to add its gradient to those of other microbatches, besides
    # what its product writes
    added_bytes: Array = 0
    gather_bytes: Array = 2  # per parameter that the distributed optimizer sends out
    low_bytes: Array = 0  # per weight of a linear layer: its forms in 8 or 4 bits
    low_only: Array = 0  # 1: these weights have no 16-bit form
    # per element of a linear layer's input that waits for its backward pass; 0: `element_bytes`
    input_bytes: Array = 0
    # and of attention's output, which its projection keeps in a form of its own (delayed scaling)
    projected_bytes: Array = 0
    saved_state: Array = 0  # per parameter that the optimizer's state is smaller than in fp32
    orthogonal_flops: Array = 0  # of a step, which make updates of matrices orthogonal (Muon)
    instances: Array = 1  # copies of the distributed optimizer's state; each is sharded
    near_context: Array = 1  # ranks of cp that exchange heads; rings are of cp over these
    gradient_copy: Array = 0  # per gradient of a shard: copies while the optimizer runs
    imbalance: Array = 1  # rows of the fullest rank's experts over those of all in the mean
    deferred_output: Array = 0  # microbatches whose gradient of the output matrix may wait

    @property
    def gpus(self) -> Array:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def replicas(self) -> Array:
        """Ranks that hold the same dense weights: dp x cp."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> Array:
        """Ranks that hold the same experts."""
        return np.maximum(1, self.dp * self.cp * self.tp / (self.ep * self.expert_tp))

    def full_share_of(self, layers: Array) -> Array:
        """Return the share of a stage with so many layers that RECOMPUTE_FULL covers.

        `full_layers` counts layers of each chunk (transformer_block.py, recompute_method block).
        """
        share = np.minimum(1.0, self.full_layers * self.vpp / np.maximum(layers, 1e-9))
        return np.where(np.asarray(self.full_layers) > 0, share, self.full_share)

    @property
    def kept_input_bytes(self) -> Array:
        """Bytes per element of a linear layer's input that waits for its backward pass."""
        return np.where(np.asarray(self.input_bytes) > 0, self.input_bytes, self.element_bytes)

    @property
    def waiting_outputs(self) -> Array:
        """Microbatches of a step whose gradient of the output matrix waits for its end."""
        return np.minimum(self.deferred_output, self.accumulation)

    @property
    def full_share_of_predicted(self) -> Array:
        """The share of token prediction layers that RECOMPUTE_FULL covers.

        A count of layers leaves them alone (multi_token_prediction.py, "Skipping recompute").
        """
        return np.where(np.asarray(self.full_layers) > 0, 0.0, self.full_share)


@dataclass(frozen=True)
class Machine:
    """A GPU and its links, with the share of the data sheet that kernels reach."""

    peak: Array  # dense 16-bit FLOP/s
    peak_low: Array  # dense 8-bit or 4-bit FLOP/s, whichever `Mesh.low` means
    memory_bandwidth: Array  # bytes/s
    nvlink_bandwidth: Array  # bytes/s per GPU and direction
    network_bandwidth: Array  # bytes/s per GPU and direction, between domains
    domain: Array  # GPUs that reach each other over NVLink
    product_efficiency: Array  # of `peak`, of a large matrix product
    low_efficiency: Array  # of `peak_low`
    # of `peak`, of fused causal attention, forward and backward, heads of 128, long sequences
    flash_efficiency: Array
    batched_efficiency: Array  # of `peak`, of the batched products of unfused attention
    memory_efficiency: Array  # of `memory_bandwidth`, of elementwise kernels
    nvlink_efficiency: Array
    network_efficiency: Array
    tail_products: Array = 0.0  # size m x n of a product that fills half a wave of tiles
    scan_efficiency: Array = 0.05  # of `peak`, of the chunked scan of a Mamba-2 block
    half_head: Array = 0.0  # head size at which exponentials take as long as products
    half_length: Array = 0.0  # keys at which fused attention reaches half its rate, and
    half_length_causal: Array = 0.0  # the same where the diagonal's tiles are half thrown away
    forward_ratio: Array = 1.0  # of fused attention: rate of the forward over the backward pass
    straggling: Array = 0.0  # standard deviation of the ranks' step times, as a share of a step
    misaligned_cost: Array = 3.0  # of batched products whose head size is no multiple of 8
    host_bandwidth: Array = 25e9  # bytes/s per GPU over PCIe, for offload
    # bytes/s and direction per GPU; ZeRO-Infinity (arXiv 2104.07857), figure 2b
    nvme_bandwidth: Array = 1.6e9
    host_memory_bandwidth: Array = 50e9  # bytes/s of main memory per GPU, for Adam on the host
    leaf_gpus: Array = 0  # GPUs under one leaf switch; 0: no limit
    oversubscription: Array = 1


@dataclass(frozen=True)
class Software:
    """What a generation of training software does: fusion, overlap, overheads."""

    flash: Array  # 1: fused attention, 0: s x s matrices in memory
    flash_speed: Array  # of the attention kernel relative to the best one for that GPU
    softmax_passes: Array  # trips of the s x s matrices through memory, unfused attention
    streaming: Array  # memory traffic of elementwise kernels over the fused minimum
    tp_overlap: Array  # share of tensor parallel traffic hidden behind products
    dp_overlap: Array  # share of gradient and parameter traffic that can hide
    pp_overlap: Array  # share of traffic between the chunks of an interleaved pipeline that hides
    ep_overlap: Array  # share of the experts' all-to-all that hides behind another microbatch
    scatter_gather: Array  # 1: pipeline traffic is split over tensor parallel ranks
    layer_overhead: Array  # seconds in which the host launches one layer's pass
    step_overhead: Array  # seconds per step
    overlaps_tensors: Array = 1  # switches, 1 or 0: userbuffers,
    beside_weights: Array = 0  # backward reductions beside the products of weight gradients,
    overlaps_gradients: Array = 1  # gradients reduced behind the backward pass,
    overlaps_parameters: Array = 1  # parameters gathered behind the forward pass,
    overlaps_stages: Array = 1  # messages between chunks behind the next chunk
    overlaps_experts: Array = 1  # tokens of one microbatch travel behind another's compute
    launched_layers: Array = 1  # share of the launches of layers that CUDA graphs leave
    launched_experts: Array = 1  # share of the launches of experts that they leave
    sharding_efficiency: Array = 1.0  # of the links, of gathering and reducing shards of ZeRO-3
    late_sums: Array = 0  # 1: behind a pipeline gradients are summed after all passes, in the open
    zero_bubble: Array = 0  # 1: ZB-1p, 2: ZB-2p (Qi et al. 2023, arXiv 2401.10241)
    norm_traffic: Array = 1  # memory traffic of a norm over that of one fused kernel
    fused_loss: Array = 0  # 1: fused cross entropy, no fp32 copy of the logits
    loss_bytes: Array = 0  # moved per logit and pass; 0: as `fused_loss` has it
    expert_overhead: Array = 0.0  # seconds in which the host launches what one expert computes
    known_sizes: Array = 0  # 1: experts take fixed numbers of tokens, which no host waits for
    one_copy: Array = 0  # 1: a token travels once to each rank or node with experts for it
    dispatch_efficiency: Array = 1.0  # of the links, of the all-to-all
    shared_overlap: Array = 0  # 1: the shared expert is computed while tokens travel
    main_bytes: Array = 12  # optimizer state per parameter: main copy and two moments
    dummy_gradients: Array = 1  # 16-bit copies of one layer's weights that backward leaves behind
    turned_copy: Array = 0  # 1: queries and keys are kept before and after rotation
    norm_bytes: Array = 0  # per element that a norm keeps beyond its input; eager ones keep fp32
    gate_copy: Array = 0  # 1: a gated MLP keeps its gate before and after the activation
    checkpoint_copies: Array = 1  # tensors [T, h] that a fully recomputed layer keeps
    logit_bytes: Array = 4  # per logit at the peak: fp32 softmax
    # of a softmax of unfused attention that has another precision than what is multiplied
    softmax_bytes: Array = 0  # per pair of tokens and head; 0: it has not
    split_logit_bytes: Array = 0  # and besides, where tensor parallel ranks share them
    gathered_logits: Array = 0  # 1: each tensor parallel rank has the whole vocabulary's
    gathered_inputs: Array = 0  # 1: what sequence parallelism gathers for a product stays gathered
    narrow_logits: Array = 0  # 1: logits before the loss are there beside their fp32 form
    loss_first: Array = 0  # 1: the loss's tensors are gone before a layer is computed again
    bucket_bytes: Array = 0.0  # blocks in which gradients are summed
    slack: Array = 1.0  # allocator's share on top of activations and buffers
    cached: Array = 0.0  # share that it holds besides as long as there is room: freed blocks
    flat_copies: Array = 0  # 1: `Mesh.gradient_copy` is one block, which freed ones cannot become
    context_bytes: Array = 0.0  # CUDA context and libraries: outside the allocator
    communicator_bytes: Array = 0.0  # and NCCL's buffers there, of each group of ranks


@dataclass(frozen=True)
class Case:
    """Everything that is needed to price a step."""

    shape: Shape
    mesh: Mesh
    machine: Machine
    software: Software


Result = TypeVar("Result")


def once(formula: Callable[[Case], Result]) -> Callable[[Case], Result]:
    """Compute a formula of a case at most once: stages and other formulas share its result.

    The results lie with the case, which is frozen, and go with it. Nobody may write into one.
    """

    @functools.wraps(formula)
    def shared(case: Case) -> Result:
        known: dict[object, Result] = case.__dict__.setdefault("_known", {})
        if formula not in known:
            known[formula] = formula(case)
        return known[formula]

    return shared


Record = TypeVar("Record")


def stack(records: Sequence[Record]) -> Record:
    """Stack records of one kind into one whose fields are arrays of shape [len(records)]."""
    first = records[0]
    columns = {
        field.name: np.array([getattr(record, field.name) for record in records], dtype=float)
        for field in fields(first)  # type: ignore[arg-type]
    }
    return replace(first, **columns)  # type: ignore[type-var]
