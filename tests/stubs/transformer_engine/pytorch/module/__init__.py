"""TransformerEngine's modules."""

from transformer_engine.pytorch.module import base
from transformer_engine.pytorch.module.base import destroy_ub, initialize_ub
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm

__all__ = [
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "base",
    "destroy_ub",
    "initialize_ub",
]
