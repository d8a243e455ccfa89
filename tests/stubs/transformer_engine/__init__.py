"""A stub of NVIDIA TransformerEngine 2.9 that computes with torch, also on a CPU.

megatron-core 0.16.1 imports it as the real library and builds its TransformerEngine layers on it.
Names, arguments, attributes of parameters, communication and `_extra_state` are those of 2.9
(NVIDIA/TransformerEngine, tag v2.9); kernels are torch's. Belongs here: what megatron-core reaches,
with the semantics that training, saving and resuming depend on. Does not belong here: speed, and
options that nothing tests, which raise NotImplementedError.
"""

from transformer_engine import common, pytorch

__version__ = "2.9.0"

__all__ = ["common", "pytorch"]
