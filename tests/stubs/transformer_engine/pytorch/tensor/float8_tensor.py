"""Tensors of 8 bits with one scale."""

from transformer_engine.pytorch.tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """One scale per tensor."""
