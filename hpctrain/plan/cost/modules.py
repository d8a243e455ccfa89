"""What Hugging Face's classes keep and move in memory where Megatron's fused kernels do not.

Read off transformers' models and torch's operations, and compared with what their forward and
backward passes hold (tests/engines/test_kept_by_modules.py). Belongs here: the constants of a
`Software` that follow from the model and its precision. Does not belong here: formulas of bytes
(see `plan_memory`) or of time (`blocks`).
"""

from __future__ import annotations

from hpctrain.spec.engines.abilities import TRANSFORMERS
from hpctrain.spec.run import RunSpec

# Per logit, in fp32 whatever the precision: log-probabilities, their gradient, and that of the
# logits (train/engines/models/tasks.py, masked_sum; torch/_decomp: _log_softmax_backward_data).
_LOGIT_BYTES = 12.0
# Where ranks share them, the bf16 ones are still there beside three of fp32: themselves, less their
# maximum, and exponentials (deepspeed/sequence/cross_entropy.py, _VocabParallelCrossEntropy).
_SPLIT_BYTES = 2.0
# x / rms(x) in fp32 (modeling_llama.py, LlamaRMSNorm), which its product with the weight keeps.
_RMS_BYTES = 4.0
# Its operations one by one (a cast, the square, its mean, two products, a cast back) move 36 bytes
# per element forward and 76 backward, where one fused kernel moves 4 and 6 of 16 bits. Without the
# casts, in fp32, 28 and 64 instead of 8 and 12.
EAGER_NORM_TRAFFIC = (36 + 76) / (4 + 6)
_WIDE_NORM_TRAFFIC = (28 + 64) / (8 + 12)
# torch.autocast leaves what is added up between blocks in fp32, where bf16 was counted.
_STREAM_BYTES = 2.0
# It makes a bf16 copy of its input for each product: of queries, keys and values, of gate and up.
_COPY_BYTES = 2.0


def eager(spec: RunSpec) -> dict[str, float]:
    """Return fields of `Software` for an engine that trains these classes; empty for others.

    Attention is torch's fused kernel in any precision. `norm_bytes` is per element of a block's
    input, in the mean of an attention and an MLP block. With autocast (DDP in bf16) weights stay
    in fp32 and each operation chooses its precision.
    """
    model, abilities = spec.model, spec.engine.abilities
    if abilities.model_classes != TRANSFORMERS or model.family == "resnet":
        return {}
    apart = model.norm == "rmsnorm"  # operations of their own: LayerNorm is one kernel of PyTorch's
    norm_bytes = _RMS_BYTES if apart else 0.0
    traffic = _WIDE_NORM_TRAFFIC if spec.precision == "fp32" else EAGER_NORM_TRAFFIC
    if abilities.autocast and spec.precision == "bf16":
        # GPT-2 has one matrix for queries, keys and values
        attention_products = 1 if model.family == "gpt" else 3
        copies = (attention_products - 1 + int(model.gated)) / 2
        norm_bytes += _STREAM_BYTES + _COPY_BYTES * copies
    return dict(
        flash=1.0,
        gate_copy=1.0,
        logit_bytes=_LOGIT_BYTES,
        split_logit_bytes=0.0 if spec.precision == "fp32" else _SPLIT_BYTES,
        loss_first=1.0,
        norm_bytes=norm_bytes,
        norm_traffic=traffic if apart else 1.0,
    )
