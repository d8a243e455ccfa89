"""How many parameters megatron-core builds: per layer, per end of the pipeline, in all.

Every count is of one tensor parallel rank and exact for megatron-core 0.16.1 (an engine test
builds the real modules on the meta device and compares). Belongs here: counting. Does not belong
here: which layer is where (`stages`) or how many bytes that makes (`memory`).

Letters: h hidden, a heads, k kv heads, d head size, f ffn, t tensor parallel size.
"""

from __future__ import annotations

from hpctrain.spec.run import ModelSpec

# Megatron-LM pads the vocabulary to a multiple of this times tp
# (`make_vocab_size_divisible_by`, megatron/training/arguments.py, default 128), so that every
# rank holds the same number of rows and the output matrix multiplication is aligned.
VOCAB_MULTIPLE = 128


def pad_vocab(vocab: int, tp: int) -> int:
    """Rows of the embedding table as the engine builds it: a multiple of 128 x tp."""
    step = VOCAB_MULTIPLE * tp
    return -(-vocab // step) * step


def norm_parameters(model: ModelSpec) -> int:
    """Weight of RMSNorm (h), weight and bias of LayerNorm (2h); replicated over tp."""
    return model.hidden * (2 if model.norm == "layernorm" else 1)


def attention_parameters(model: ModelSpec, tp: int) -> int:
    """Column-parallel QKV, h x (a + 2k)d / t, and row-parallel projection, ad x h / t.

    The bias of a column-parallel layer is split, that of a row-parallel one replicated
    (megatron/core/tensor_parallel/layers.py). With k < t the columns are split all the same
    and gathered in the forward pass (megatron/core/transformer/attention.py:1399), so there are
    no copies of key/value weights.
    """
    qkv = (model.heads + 2 * model.key_value_heads) * model.head_size // tp
    projection = model.heads * model.head_size // tp * model.hidden
    bias = qkv + model.hidden if model.bias else 0
    return model.hidden * qkv + projection + bias


def mlp_parameters(model: ModelSpec, tp: int) -> int:
    """Column-parallel h x f (2f with a gate) and row-parallel f x h, both divided by t."""
    first = (2 if model.gated else 1) * model.ffn_size // tp
    bias = first + model.hidden if model.bias else 0
    return model.hidden * first + model.ffn_size // tp * model.hidden + bias


def layer_parameters(model: ModelSpec, tp: int) -> int:
    """One transformer layer: two norms, attention, MLP."""
    return 2 * norm_parameters(model) + attention_parameters(model, tp) + mlp_parameters(model, tp)


def embedding_parameters(model: ModelSpec, tp: int) -> int:
    """Word embeddings split over tp by rows; learned positions (seq x h) replicated."""
    words = pad_vocab(model.vocab, tp) // tp * model.hidden
    return words + (model.seq * model.hidden if model.positions == "learned" else 0)


def output_parameters(model: ModelSpec, tp: int, with_embedding: bool) -> int:
    """Final norm and output matrix (no bias in GPTModel).

    A tied model has no output matrix of its own where the embedding is on the same GPU; behind a
    pipeline the last stage holds a copy of the word embeddings
    (GPTModel: skip_weight_param_allocation = pre_process and share_embeddings).
    """
    shared = bool(model.tied) and with_embedding
    matrix = 0 if shared else pad_vocab(model.vocab, tp) // tp * model.hidden
    return norm_parameters(model) + matrix


def total_parameters(model: ModelSpec) -> int:
    """Parameters of the model itself: each once, vocabulary as given (not padded)."""
    positions = model.seq * model.hidden if model.positions == "learned" else 0
    tables = model.vocab * model.hidden * (1 if model.tied else 2)
    return model.layers * layer_parameters(model, 1) + tables + positions + norm_parameters(model)


def linear_parameters(model: ModelSpec) -> int:
    """Weights that multiply every token: linear layers and the output matrix, no biases."""
    attention = 2 * model.hidden * (model.heads + model.key_value_heads) * model.head_size
    mlp = (3 if model.gated else 2) * model.hidden * model.ffn_size
    return model.layers * (attention + mlp) + model.vocab * model.hidden


def model_flops_per_step(model: ModelSpec, global_batch: int) -> float:
    """Floating-point operations of the model in one optimizer step; recomputation not counted.

    Convention (model FLOPs, non-causal attention): 6 per linear weight and token for forward and
    backward, plus 12 L a d s per token for the two attention products over the whole s x s
    square. Equal to 72 B s L h^2 (1 + s/6h + V/12Lh) for a = h/d, f = 4h (Narayanan et al. 2021,
    arXiv 2104.04473, appendix, without its factor 4/3 for recomputation; Korthikanti et al.
    2022, arXiv 2205.05198, appendix A).
    """
    attention = 12 * model.layers * model.heads * model.head_size * model.seq
    return float((6 * linear_parameters(model) + attention) * global_batch * model.seq)
