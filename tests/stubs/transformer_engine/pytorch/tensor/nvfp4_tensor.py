"""Tensors of 4 bits."""

from transformer_engine.pytorch.tensor import QuantizedTensor


class NVFP4Tensor(QuantizedTensor):
    """One scale per 16 numbers."""
