"""TransformerEngine's layers for torch: the names that megatron-core 0.16.1 uses."""

from transformer_engine.pytorch import (
    cpp_extensions,
    cpu_offload,
    cross_entropy,
    distributed,
    fp8,
    graph,
    module,
    ops,
    optimizers,
    permutation,
    router,
    tensor,
)
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import (
    Fp8Padding,
    Fp8Unpadding,
    autocast,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from transformer_engine.pytorch.module import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "autocast",
    "cpp_extensions",
    "cpu_offload",
    "cross_entropy",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "graph",
    "module",
    "ops",
    "optimizers",
    "permutation",
    "quantized_model_init",
    "router",
    "tensor",
]
