"""Count the parameters and operations of a model: exactly, per layer, per stage, in all.

Does not belong here: which layer is where (`mesh.stages`), how many bytes that makes
(`cost.prediction`), models that read images (`vision`), which layers LoRA can adapt
(`trainable_hugging_face`).

Letters: h hidden, a heads, k kv heads, d head size, f ffn, L layers, s sequence length, t tensor
parallel size, B global batch, V vocabulary, r rank of LoRA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpctrain.plan.documents import Layout
from hpctrain.plan.model import vision
from hpctrain.spec.architecture import LinearSpec, MambaSpec, MlaSpec, MoeSpec
from hpctrain.spec.families import family_named
from hpctrain.spec.model import LayerKind, ModelSpec
from hpctrain.spec.run import RunSpec

# -- Operations of a training step: the convention behind every printed MFU ---------------------
# Model FLOPs: products of the model, forward and backward; no recomputation, softmax, norms or
# optimizer.


FORWARD_AND_BACKWARD = 3  # the backward pass is two products for each one of the forward pass


def attention_weights(model: ModelSpec) -> int:
    """Count weights of the attention of one layer that multiply every token."""
    output = model.heads * model.value_size * model.hidden
    if model.mla is None:
        queries = model.heads * (2 if model.attends.gate else 1)
        return output + model.hidden * (queries + 2 * model.key_value_heads) * model.head_size
    mla = model.mla
    down = model.hidden * (mla.kv_rank + mla.rope_dim + (mla.q_rank or 0))
    return output + down + latent_up_weights(model, mla)


def mixer_weights(model: ModelSpec, layer: int) -> int:
    """Count weights of `layer` that multiply every token, without its MLP."""
    mixer = model.mixer(layer)
    if mixer in ("mlp", "moe"):
        return 0
    if mixer == "mamba" and model.mamba is not None:
        mamba = model.mamba
        return model.hidden * (_mamba_width(mamba) + mamba.inner) + _convolved(mamba) * mamba.conv
    if mixer == "linear" and model.linear is not None:
        return _linear_weights(model, model.linear)
    return attention_weights(model)


def _mamba_width(mamba: MambaSpec) -> int:
    """Count outputs of the first projection: gate, input, B, C and a step for each head."""
    return 2 * mamba.inner + 2 * mamba.groups * mamba.state + mamba.heads


def _convolved(mamba: MambaSpec) -> int:
    """Count channels of the convolution: input, B and C."""
    return mamba.inner + 2 * mamba.groups * mamba.state


def _linear_weights(model: ModelSpec, linear: LinearSpec) -> int:
    """Count weights of linear attention that multiply every token, its convolution included.

    Gated DeltaNet: queries, keys, values and gate, two numbers for each head, output. Lightning
    attention: queries, keys, values, gate, output (modeling_qwen3_next.py, modeling_minimax.py).
    """
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    weights = model.hidden * (2 * keys + 3 * values)
    if linear.kind == "gated_delta":
        weights += model.hidden * 2 * linear.value_heads
    return weights + (2 * keys + values) * (linear.conv or 0)


def latent_up_weights(model: ModelSpec, mla: MlaSpec) -> int:
    """Count weights of one layer between the ranks of latent attention and its heads."""
    queries = (mla.q_rank or model.hidden) * model.heads * model.query_key_size
    return queries + mla.kv_rank * model.heads * (mla.nope_dim + mla.value_dim)


def mlp_weights(model: ModelSpec, layer: int) -> int:
    """Count weights of the MLP of `layer` that multiply a token: active experts and router."""
    matrices = (3 if model.gated else 2) * model.hidden
    if model.moe is None or not model.has_experts(layer):
        return matrices * model.ffn_size if model.has_mlp(layer) else 0
    width = model.moe.top_k * model.moe.ffn + model.moe.shared_ffn
    return matrices * width + model.hidden * (model.moe.experts + int(model.moe.shared_gate))


def linear_parameters(model: ModelSpec) -> int:
    """Count weights that multiply every token: linear layers and output matrix, no biases.

    Of experts those that are active. A multi-token prediction layer is a layer, its projection
    (2h x h) and once more the output matrix. BERT has the linear layer before its output matrix;
    what it does once for a sequence (pooler, classes) does not count, nor do the ends of a ViT.
    """
    counted = {kind: layer for layer, kind in enumerate(model.kinds)}
    weights = {
        kind: mixer_weights(model, layer) + mlp_weights(model, layer)
        for kind, layer in counted.items()
    }
    layers = sum(weights[kind] for kind in model.kinds)
    if model.reads_images or model.classes is not None:
        return layers
    embedded = model.embedding_size or model.hidden
    output = model.vocab * embedded
    head = model.hidden**2 if model.reads_masked_text else 0
    ends = 2 * embedded * model.hidden if model.embedding_size is not None else 0
    last = mixer_weights(model, model.layers - 1) + mlp_weights(model, model.layers - 1)
    predicted = model.mtp_layers * (last + 2 * model.hidden**2 + output)
    return layers + output + head + ends + predicted


def linear_multiplications(model: ModelSpec) -> int:
    """Count products of a sample's tokens with `linear_parameters`.

    Behind an encoder there are two attentions in a layer, of which the second one takes keys and
    values of the encoder's tokens, queries of the decoder's.
    """
    if not model.encoder_layers:
        return linear_parameters(model) * model.seq
    own, mlp = attention_weights(model), mlp_weights(model, 0)
    keys = model.hidden * 2 * model.key_value_heads * model.head_size
    read = model.encoder_layers * (own + mlp) + model.layers * keys
    written = model.layers * (2 * own - keys + mlp) + model.vocab * model.hidden
    return read * model.seq + written * model.target_seq


def attention_flops_per_token(model: ModelSpec, causal: bool = False) -> float:
    """Count the two attention products of all layers, both passes, for one token.

    Q K^T and P V are 2 s a d each in the forward pass, so 12 s a d for each layer (6 s a times
    both head sizes where they differ). `causal`: half of that, as nothing is needed above the
    diagonal, and a window at most; encoders have no diagonal and stay as they are. Layers without
    a square of tokens (state spaces, linear attention) have none of it.
    """
    sizes = model.query_key_size + model.value_size
    halved = causal and model.causal
    whole = float(model.seq) / (2 if halved else 1)
    total = 0.0
    kinds = (*model.kinds, *model.kinds[-1:] * model.mtp_layers)
    if model.encoder_layers:
        # squares of the encoder, of the decoder, and between them, over the encoder's tokens
        share = model.target_seq / model.seq
        own = model.target_seq / (2 if halved else 1)
        total = model.encoder_layers * model.seq + model.layers * share * (own + model.seq)
        kinds = ()
    for mixer, count in Counter(kind.mixer for kind in kinds).items():
        reach = {"window": model.attends.window, "chunk": model.attends.chunk}.get(mixer)
        if mixer in ("full", "window", "chunk"):
            total += count * (min(whole, reach) if halved and reach else whole)
    return 2 * FORWARD_AND_BACKWARD * model.heads * sizes * total


def model_flops_per_step(model: ModelSpec, global_batch: int, causal: bool = False) -> float:
    """Count floating-point operations of one optimizer step; recomputation not counted.

    Convention (model FLOPs, non-causal attention): 6 per linear weight and token for forward and
    backward, plus 12 L a d s per token for the two attention products over the whole s x s
    square. Equal to 72 B s L h^2 (1 + s/6h + V/12Lh) for a = h/d, f = 4h (Narayanan et al. 2021,
    arXiv 2104.04473, appendix, without its factor 4/3 for recomputation; Korthikanti et al.
    2022, arXiv 2205.05198, appendix A). With `causal` the attention counts half, as newer
    benchmark tables have it (6 L a d s). A ResNet: 6 per weight and position of each convolution.
    """
    if model.family == "resnet":
        return float(2 * FORWARD_AND_BACKWARD * vision.resnet_multiplications(model) * global_batch)
    per_token = 2 * FORWARD_AND_BACKWARD * linear_multiplications(model) / model.seq
    text = (per_token + attention_flops_per_token(model, causal)) * model.seq
    ends = vision.end_multiplications(model) if model.family == "vit" else 0
    return float((text + 2 * FORWARD_AND_BACKWARD * ends) * global_batch)


# -- Parameters that megatron-core builds: per layer, per pipeline end, in all --------------------
# Every count is of one tensor parallel rank and exact for megatron-core 0.16.1 (an engine test
# builds the real modules on the meta device and compares).


# Megatron-LM pads the vocabulary to a multiple of this times tp
# (`make_vocab_size_divisible_by`, megatron/training/arguments.py, default 128), so that every
# rank holds the same number of rows and the output matrix multiplication is aligned.
VOCAB_MULTIPLE = 128


def pad_vocab(vocab: int, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Return the rows of the embedding table of the engine: a multiple of `multiple` x tp."""
    step = multiple * tp
    return -(-vocab // step) * step


def expert_tp(tp: int, ep: int, etp: int | None = None) -> int:
    """Return the ranks that split one expert: `etp`, else 1 where experts are spread, else tp.

    Published recipes set 1 with ep > 1; megatron-core's own default is tp in both cases
    (`expert_tensor_parallel_size`, megatron/core/model_parallel_config.py:413).
    """
    if etp is not None:
        return etp
    return 1 if ep > 1 else tp


# Numbers of a norm for each number that it is over.
_OF_NORM = {"layernorm": 2, "layernorm_no_bias": 1, "layernorm_no_weights": 0, "rmsnorm": 1}
# Norms of one layer.
_BLOCK_NORMS = {"before": 2, "after": 2, "both": 4}


def norm_parameters(model: ModelSpec, size: int | None = None) -> int:
    """Count the weight of RMSNorm (h), weight and bias of LayerNorm (2h); replicated over tp.

    `size`: what the norm is over, if not the hidden size.
    """
    return (model.hidden if size is None else size) * _OF_NORM[model.norm or "layernorm"]


def block_norm_parameters(model: ModelSpec) -> int:
    """Count the norms of one layer, without those of queries and keys."""
    norms = _BLOCK_NORMS[model.norm_place]
    if model.single_blocks or model.parallel_residual == "one_norm":
        norms = 1
    return norms * norm_parameters(model)


def attention_parameters(model: ModelSpec, tp: int) -> int:
    """Count column-parallel QKV, h x (a + 2k)d / t, and row-parallel projection, ad x h / t.

    The bias of a column-parallel layer is split, that of a row-parallel one replicated
    (megatron/core/tensor_parallel/layers.py). With k < t the columns are split all the same
    and gathered in the forward pass (megatron/core/transformer/attention.py:1399), so there are
    no copies of key/value weights. A gated output doubles the queries; norms of queries and keys
    over a head are replicated, sinks split.
    """
    if model.mla is not None:
        return latent_attention_parameters(model, model.mla, tp)
    queries = model.heads * (2 if model.attends.gate else 1)
    qkv = (queries + 2 * model.key_value_heads) * model.head_size // tp
    projection = model.heads * model.head_size // tp * model.hidden
    bias = (qkv if model.qkv_bias else 0) + (model.hidden if model.attention_output_bias else 0)
    sinks = model.heads // tp if model.attends.sinks else 0
    return model.hidden * qkv + projection + bias + sinks + _qk_norm_parameters(model, tp)


def _qk_norm_parameters(model: ModelSpec, tp: int) -> int:
    """Count the norms of queries and keys of one layer; weights of each head are split, and have
    no bias beside them."""
    heads = (model.heads + model.key_value_heads) // tp
    if model.attends.qk_norm in ("each_head", "width"):
        return heads * model.head_size
    both = 2 if model.attends.qk_norm in ("head", "head_turned") else 0
    return both * norm_parameters(model, model.head_size)


def mixer_parameters(model: ModelSpec, tp: int, layer: int) -> int:
    """Count what mixes the tokens of one layer: attention, a state space, linear attention."""
    mixer = model.mixer(layer)
    if mixer in ("mlp", "moe"):
        return 0
    if mixer == "mamba" and model.mamba is not None:
        return mamba_parameters(model, model.mamba) // tp
    if mixer == "linear" and model.linear is not None:
        return linear_attention_parameters(model, model.linear) // tp
    return attention_parameters(model, tp)


def mamba_parameters(model: ModelSpec, mamba: MambaSpec) -> int:
    """Count a Mamba-2 block: projections, convolution, A, D and step of each head, gated norm.

    transformers, modeling_mamba2.py (Mamba2Mixer).
    """
    inner, width, channels = mamba.inner, _mamba_width(mamba), _convolved(mamba)
    projections = model.hidden * (width + inner)
    biases = (width + model.hidden if mamba.bias else 0) + (channels if mamba.conv_bias else 0)
    return projections + biases + channels * mamba.conv + 3 * mamba.heads + inner


def linear_attention_parameters(model: ModelSpec, linear: LinearSpec) -> int:
    """Count linear attention: what multiplies tokens, and A, step and norm of gated DeltaNet, or
    the norm of lightning attention."""
    weights = _linear_weights(model, linear)
    if linear.kind == "gated_delta":
        return weights + 2 * linear.value_heads + linear.value_dim
    return weights + linear.value_heads * linear.value_dim


def latent_attention_parameters(model: ModelSpec, mla: MlaSpec, tp: int) -> int:
    """Count MLA of DeepSeek-V2 (arXiv 2405.04434, equations 9-19), with both latent norms.

    Up-projections and output are split over tp; the down-projections are copies on every rank
    (TransformerEngine's "duplicated" linear layers, without which megatron-core builds no latent
    attention: megatron/core/transformer/multi_latent_attention.py:408 and 453). Only the output
    projection can have a bias.
    """
    queries = model.heads * model.query_key_size // tp
    keys_values = model.heads * (mla.nope_dim + mla.value_dim) // tp
    down = model.hidden * (mla.kv_rank + mla.rope_dim)
    up = mla.kv_rank * keys_values + norm_parameters(model, mla.kv_rank)
    if mla.q_rank is None:
        up += model.hidden * queries
    else:
        down += model.hidden * mla.q_rank
        up += mla.q_rank * queries + norm_parameters(model, mla.q_rank)
    output = model.heads * mla.value_dim // tp * model.hidden
    biases = mla.kv_rank + mla.rope_dim + (mla.q_rank or 0) if model.bias == "attention" else 0
    return down + up + output + biases + (model.hidden if model.attention_output_bias else 0)


def mlp_parameters(model: ModelSpec, tp: int, ffn: int | None = None) -> int:
    """Count column-parallel h x f (2f with a gate) and row-parallel f x h, divided by t.

    `ffn`: size of the MLP, if not that of the model's dense layers.
    """
    width = (model.ffn_size if ffn is None else ffn) // tp
    first = (2 if model.gated else 1) * width
    bias = first + model.hidden if model.mlp_bias else 0
    learned = 2 if model.activation == "xielu" else 0  # arXiv 2411.13010: two slopes
    return model.hidden * first + width * model.hidden + bias + learned


def expert_parameters(model: ModelSpec, tp: int, ep: int = 1, etp: int | None = None) -> int:
    """Count routed experts of one MoE layer on one rank: experts / ep of them, each an MLP / etp.

    They are apart because their gradients and optimizer state are shared by fewer ranks
    (expert data parallel: tp x cp x dp / (ep x expert tp)). 0 for a dense model.
    """
    if model.moe is None:
        return 0
    return model.moe.experts // ep * mlp_parameters(model, expert_tp(tp, ep, etp), model.moe.ffn)


def router_parameters(model: ModelSpec, moe: MoeSpec, tp: int) -> int:
    """Count an MoE layer without routed experts: the router, replicated, and shared experts.

    Router: experts x h, and a bias where linear layers have one
    (megatron/core/transformer/moe/router.py:53-61). Shared experts are one MLP split over tp.
    """
    router = moe.experts * (model.hidden + (1 if model.mlp_bias else 0))
    gate = model.hidden if moe.shared_gate else 0
    return router + gate + (mlp_parameters(model, tp, moe.shared_ffn) if moe.shared_ffn else 0)


def layer_parameters(
    model: ModelSpec, tp: int, ep: int = 1, layer: int | None = None, etp: int | None = None
) -> int:
    """Count one layer: its norms, what mixes tokens, MLP or experts.

    `layer`: which one (0 is the first), where a model has several kinds; default: the last.
    """
    layer = model.layers - 1 if layer is None else layer
    parameters = block_norm_parameters(model) + mixer_parameters(model, tp, layer)
    parameters += cross_attention_parameters(model, tp)
    if model.moe is not None and model.has_experts(layer):
        shared = router_parameters(model, model.moe, tp)
        return parameters + shared + expert_parameters(model, tp, ep, etp)
    return parameters + (mlp_parameters(model, tp) if model.has_mlp(layer) else 0)


def cross_attention_parameters(model: ModelSpec, tp: int) -> int:
    """Count the attention of a layer to what an encoder returns, with its norm."""
    return attention_parameters(model, tp) + norm_parameters(model) if model.encoder_layers else 0


def encoder_parameters(model: ModelSpec, tp: int) -> int:
    """Count an encoder beside the layers, with its own positions and norms; 0 without one.

    It has the embeddings of the decoder's words.
    """
    if not model.encoder_layers:
        return 0
    layer = layer_parameters(model, tp) - cross_attention_parameters(model, tp)
    last = norm_parameters(model) if model.final_norm else 0
    return model.encoder_layers * layer + _other_embeddings(model, model.encoder_layers) + last


def embedding_parameters(model: ModelSpec, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Count word embeddings split over tp by rows; learned positions (seq x h) replicated.

    BERT has an embedding for each of two segments besides (tokentype_embeddings; the task of
    predicting if one follows the other is left out, for there is no loss without it: Liu et al.
    2019, arXiv 1907.11692, section 4.2). A ViT has its patch projection and class token for words,
    see `vision`.
    """
    if model.reads_images:
        return vision.stem_parameters(model)
    word_rows = pad_vocab(model.vocab, tp, multiple) // tp
    words = word_rows * (model.embedding_size or model.hidden)
    return words + _other_embeddings(model, model.layers) + encoder_parameters(model, tp)


def _other_embeddings(model: ModelSpec, layers: int) -> int:
    """Count what else is before so many layers, replicated over tp: positions, segments, a norm,
    and both projections of embeddings of another size."""
    learned = model.positions == "learned"
    rows = (model.max_seq or model.seq) + model.position_offset if learned else 0
    norm = norm_parameters(model) if model.embedding_norm else 0
    projections = 2 * model.hidden * (model.embedding_size or 0)
    tables = layers if model.distances.each_layer else 1
    distances = tables * model.distances.buckets * model.heads
    norm += distances if model.positions == "relative" else 0
    return (rows + model.segments) * model.hidden + norm + projections


def output_parameters(
    model: ModelSpec, tp: int, with_embedding: bool, multiple: int = VOCAB_MULTIPLE
) -> int:
    """Count final norm, output matrix (no bias in GPTModel), and the heads of BERT.

    A tied model has no output matrix of its own where the embedding is on the same GPU; behind a
    pipeline the last stage holds a copy of the word embeddings
    (GPTModel: skip_weight_param_allocation = pre_process and share_embeddings).
    """
    if model.reads_images:
        return vision.head_parameters(model)
    shared = bool(model.tied) and with_embedding
    rows = pad_vocab(model.vocab, tp, multiple) // tp
    matrix = 0 if shared else rows * (model.embedding_size or model.hidden)
    bias = rows if model.output_bias else 0
    heads = encoder_head_parameters(model, rows)
    norm = norm_parameters(model) if model.final_norm else 0
    return norm + heads + (0 if model.classes else matrix + bias)


def encoder_head_parameters(model: ModelSpec, rows: int) -> int:
    """Count an encoder's head, without norm and output matrix of `rows`; 0 for others.

    Classes of texts: a linear layer and one over the classes (BertForSequenceClassification with
    its pooler, DistilBertForSequenceClassification). Masked words of DistilBERT: a linear layer, a
    norm and the output's bias; BERT's are the same (BertForMaskedLM; megatron-core's
    bert_lm_head.py).
    """
    if not model.reads_masked_text:
        return 0
    linear = model.hidden * model.hidden + model.hidden
    if model.classes is not None:
        return linear + model.classes * (model.hidden + 1)
    return linear + norm_parameters(model) + rows


def mtp_parameters(model: ModelSpec, tp: int, ep: int = 1, etp: int | None = None) -> int:
    """Count all multi-token prediction layers.

    Each has a transformer layer like the last one, the column-parallel projection of two joined
    states, 2h x h / t, and three norms
    (megatron/core/transformer/multi_token_prediction.py:632-678). Embedding and output matrix are
    those of the model (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """
    layer = layer_parameters(model, tp, ep, etp=etp)
    projection = 2 * model.hidden * model.hidden // tp
    return model.mtp_layers * (layer + projection + 3 * norm_parameters(model))


def layers_parameters(
    model: ModelSpec, layers: Iterable[int], tp: int, ep: int = 1, etp: int | None = None
) -> int:
    """Count these layers, whatever their kinds; those of a kind have the same."""
    kinds, total = dict[LayerKind, int](), 0
    for layer in layers:
        kind = model.kinds[layer]
        if kind not in kinds:
            kinds[kind] = layer_parameters(model, tp, ep, layer, etp)
        total += kinds[kind]
    return total


def stage_parameters(
    model: ModelSpec,
    layout: Layout,
    layers: Iterable[int],
    *,
    first: bool,
    last: bool,
    final_norm: bool,
    multiple: int = VOCAB_MULTIPLE,
) -> int:
    """Count one pipeline stage: its layers, and the ends of the model on it.

    Token prediction is on the last stage, with a copy of the embedding (GPTModel: `pre_process or
    mtp_process`), tied or not.
    """
    if model.family == "resnet" or model.counted is not None:
        assert first and last, "it is planned with data parallelism only"
        return total_parameters(model)
    tp, ep, etp = layout.tp, layout.ep, layout.etp
    parameters = layers_parameters(model, layers, tp, ep, etp)
    if first or (last and model.mtp_layers):
        parameters += embedding_parameters(model, tp, multiple)
    if last:
        parameters += output_parameters(model, tp, first, multiple)
        parameters += mtp_parameters(model, tp, ep, etp)
    if not model.final_norm:
        return parameters
    return parameters + (int(final_norm) - int(last)) * norm_parameters(model)


def total_parameters(model: ModelSpec) -> int:
    """Count parameters of the model itself: each once, vocabulary as given (not padded).

    Multi-token prediction layers count; they are dropped after training.
    """
    if model.counted is not None:
        return model.counted.parameters
    if model.family == "resnet":
        return vision.resnet_parameters(model)
    layers = layers_parameters(model, range(model.layers), 1)
    if model.reads_images:
        return layers + vision.stem_parameters(model) + vision.head_parameters(model)
    tables = 1 if model.tied or model.classes else 2
    ends = tables * model.vocab * (model.embedding_size or model.hidden)
    ends += _other_embeddings(model, model.layers) + encoder_parameters(model, 1)
    ends += norm_parameters(model) if model.final_norm else 0
    ends += model.vocab if model.output_bias else 0
    ends += encoder_head_parameters(model, model.vocab)
    return layers + mtp_parameters(model, 1) + ends


# -- The model that a spec trains, with LoRA's adapters -------------------------------------------
# Exact for peft 0.21 (an engine test counts).


# (last name, inputs, outputs) of a linear layer in the blocks
Linear = tuple[str, int, int]


@dataclass(frozen=True)
class ModelCounts:
    """Parameters and operations of one spec.

    `parameters`: each once, adapters included. `trainable`: those with a gradient and optimizer
    state. `adapters_per_layer`: parameters of the adapters of one layer, 0 without LoRA.
    `vocab_multiple`: rows of an embedding table on each rank are a multiple of it.
    """

    parameters: int
    trainable: int
    adapters_per_layer: int
    flops_per_step: float
    vocab_multiple: int

    @property
    def trainable_share(self) -> float:
        """Trainable parameters over all parameters."""
        return self.trainable / self.parameters


def count_model(spec: RunSpec) -> ModelCounts:
    """Count the parameters and operations of a spec.

    LoRA puts two matrices, inputs x r and r x outputs, beside each linear layer that it adapts.
    With it a step has no weight gradients of frozen layers, one of three products; adapters have
    all three. A new classifier is trained in full: the output layer, and of DistilBERT the layer
    before it; BERT's pooler belongs to its body.
    """
    model, lora = spec.model, spec.lora
    total = total_parameters(model)
    flops = model_flops_per_step(model, spec.batch.global_)
    padded = spec.engine.abilities.pads_vocab or model.reads_images
    multiple = (model.vocab_multiple or VOCAB_MULTIPLE) if padded else 1
    if lora is None:
        return ModelCounts(total, total, 0, flops, multiple)
    adapters_of = [
        lora.rank
        * sum(
            inputs + outputs
            for name, inputs, outputs in linear_layers(model, layer)
            if lora.targets == "all" or name in lora.targets
        )
        for layer in range(model.layers)
    ]
    trainable = sum(adapters_of)
    adapters = -(-trainable // model.layers)
    if spec.learned_task == "classification":
        classes = model.vocab if model.reads_images else model.classes or 0
        before = model.hidden * model.hidden + model.hidden if model.family == "distilbert" else 0
        trainable += before + classes * (model.hidden + 1)
    ends = vision.end_multiplications(model) if model.family == "vit" else 0
    frozen = 2 * (linear_multiplications(model) + ends)
    added = 6 * sum(adapters_of) * model.seq
    flops += float((added - frozen) * spec.batch.global_)
    return ModelCounts(total + sum(adapters_of), trainable, adapters, flops, multiple)


def matrix_parameters(model: ModelSpec) -> int:
    """Count the weights in matrices of layers, which Muon updates; no experts."""
    return sum(mixer_weights(model, n) + mlp_weights(model, n) for n in range(model.layers))


# Newton-Schulz iterations of torch.optim.Muon and of Megatron-LM.
_ORTHOGONAL_STEPS = 5


def orthogonal_flops(model: ModelSpec) -> float:
    """Count the operations that make the updates of all matrices orthogonal (Muon).

    Of m x n, m the smaller: in each iteration two products of m x m x n and one of m x m x m
    (Jordan et al. 2024; torch/optim/_muon.py, _zeropower_via_newtonschulz).
    """
    total = 0.0
    for layer in range(model.layers):
        for _, inputs, outputs in linear_layers(model, layer):
            m, n = min(inputs, outputs), max(inputs, outputs)
            total += _ORTHOGONAL_STEPS * 2.0 * (2 * m * m * n + m**3)
    return total


def linear_layers(model: ModelSpec, layer: int) -> Iterator[Linear]:
    """List the linear layers of one block by transformers' names; a ResNet has none."""
    family = family_named(model.family)
    h, size = model.hidden, model.head_size
    # routed experts are no linear layers, shared ones are
    shared = model.moe.shared_ffn if model.moe is not None and model.has_experts(layer) else 0
    f = model.ffn_size if model.has_mlp(layer) else shared
    queries, keys = model.heads * size, model.key_value_heads * size
    sizes = {
        "query": (h, queries * (2 if model.attends.gate else 1)),
        "key": (h, keys),
        "value": (h, keys),
        "qkv": (h, queries + 2 * keys),
        "output": (model.heads * model.value_size, h),
        "gate": (h, f),
        "up": (h, f),
        "gate_up": (h, 2 * f),
        "down": (f, h),
    }
    if model.mla is not None:
        mla, heads = model.mla, model.heads
        rank = mla.q_rank or h
        sizes |= {
            "query": (h, heads * model.query_key_size),
            "query_down": (h, rank),
            "query_up": (rank, heads * model.query_key_size),
            "latent_down": (h, mla.kv_rank + mla.rope_dim),
            "latent_up": (mla.kv_rank, heads * (mla.nope_dim + mla.value_dim)),
        }
        absent = ("query",) if mla.q_rank else ("query_down", "query_up")
        sizes = {role: both for role, both in sizes.items() if role not in absent}
    of_mlp = ("gate", "up", "gate_up", "down")
    attends = model.mixer(layer) in ("full", "window", "chunk")  # others have other linear layers
    for name, role in family.linears if family is not None else ():
        if role in sizes and (f if role in of_mlp else attends):
            yield (name, *sizes[role])
