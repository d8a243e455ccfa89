"""Models of Hugging Face's classes, for the engines that train PyTorch modules.

Belongs here: from a `ModuleConfig` to a module with weights, its repeated blocks, and its loss.
Does not belong here: how a module is spread over GPUs (see `native`, `deepspeed`), data.
"""
