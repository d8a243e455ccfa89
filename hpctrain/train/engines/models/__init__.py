"""Build Hugging Face models for the engines that train PyTorch modules (`native`, `deepspeed`).

Belongs here: from a `ModuleConfig` to a module with weights, its repeated blocks and its loss, and
the steps that both engines share. Does not belong here: how a module is distributed over GPUs,
data.
"""
