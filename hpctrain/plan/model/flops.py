"""Count the operations of a training step: the convention behind every printed MFU.

Model FLOPs: products of the model, forward and backward; no recomputation, softmax, norms or
optimizer. Belongs here: operations of the whole model. Does
not belong here: what one GPU does of it, or how long that takes.

Letters: h hidden, a heads, L layers, s sequence length, B global batch, V vocabulary.
"""

from __future__ import annotations

from hpctrain.plan.model import vision
from hpctrain.spec.model import MlaSpec, ModelSpec

FORWARD_AND_BACKWARD = 3  # the backward pass is two products for each one of the forward pass


def attention_weights(model: ModelSpec) -> int:
    """Count weights of the attention of one layer that multiply every token."""
    output = model.heads * model.value_size * model.hidden
    if model.mla is None:
        return output + model.hidden * (model.heads + 2 * model.key_value_heads) * model.head_size
    mla = model.mla
    down = model.hidden * (mla.kv_rank + mla.rope_dim + (mla.q_rank or 0))
    return output + down + latent_up_weights(model, mla)


def latent_up_weights(model: ModelSpec, mla: MlaSpec) -> int:
    """Count weights of one layer between the ranks of latent attention and its heads."""
    queries = (mla.q_rank or model.hidden) * model.heads * model.query_key_size
    return queries + mla.kv_rank * model.heads * (mla.nope_dim + mla.value_dim)


def mlp_weights(model: ModelSpec, layer: int) -> int:
    """Count weights of the MLP of `layer` that multiply a token: active experts and router."""
    matrices = (3 if model.gated else 2) * model.hidden
    if model.moe is None or not model.has_experts(layer):
        return matrices * model.ffn_size
    width = model.moe.top_k * model.moe.ffn + model.moe.shared_ffn
    return matrices * width + model.hidden * model.moe.experts


def linear_parameters(model: ModelSpec) -> int:
    """Count weights that multiply every token: linear layers and output matrix, no biases.

    Of experts those that are active. A multi-token prediction layer is a layer, its projection
    (2h x h) and once more the output matrix. BERT has the linear layer before its output matrix;
    what it does once for a sequence (pooler, classes) does not count, nor do the ends of a ViT.
    """
    attention = attention_weights(model)
    layers = sum(attention + mlp_weights(model, layer) for layer in range(model.layers))
    if model.family == "vit":
        return layers
    if model.classes is not None:
        return layers
    output = model.vocab * model.hidden
    head = model.hidden**2 if model.family in ("bert", "distilbert") else 0
    last = attention + mlp_weights(model, model.layers - 1)
    predicted = model.mtp_layers * (last + 2 * model.hidden**2 + output)
    return layers + output + head + predicted


def attention_flops_per_token(model: ModelSpec, causal: bool = False) -> float:
    """Count the two attention products of all layers, both passes, for one token.

    Q K^T and P V are 2 s a d each in the forward pass, so 12 s a d for each layer (6 s a times
    both head sizes where they differ). `causal`: half of that, as nothing is needed above the
    diagonal; encoders have no diagonal and stay as they are.
    """
    layers = model.layers + model.mtp_layers
    sizes = model.query_key_size + model.value_size
    square = 2 * FORWARD_AND_BACKWARD * layers * model.heads * sizes * model.seq
    return square / 2 if causal and model.causal else float(square)


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
    per_token = 2 * FORWARD_AND_BACKWARD * linear_parameters(model)
    text = (per_token + attention_flops_per_token(model, causal)) * model.seq
    ends = vision.end_multiplications(model) if model.family == "vit" else 0
    return float((text + 2 * FORWARD_AND_BACKWARD * ends) * global_batch)
