"""Weights from one form into another: Hugging Face's directories, megatron-core, run checkpoints.

Belongs here: reading one, writing another. Does not belong here: which shapes are the same in both
(`hpctrain.engines.conversion`), training. Started as a process by `hpctrain.convert.of_spec`.
"""
