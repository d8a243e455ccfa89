"""Tensors of 8 bits with one scale per block."""

from transformer_engine.pytorch.tensor import QuantizedTensor


class MXFP8Tensor(QuantizedTensor):
    """One scale per 32 numbers."""
