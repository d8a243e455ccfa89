"""Run an external Megatron-LM inside the process of a rank, and supervise it from its output.

Belongs here: starting `pretrain_gpt.py`, stopping it, reading its output, publishing its
checkpoints. Does not belong here: any line of Megatron-LM, or code that trains.
"""
