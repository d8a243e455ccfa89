"""Somebody's own Megatron-LM, run in the process of a rank and told apart from it by its signs.

Belongs here: starting `pretrain_gpt.py`, stopping it, reading its words, publishing what it saves.
Does not belong here: any line of Megatron-LM, or anything that trains.
"""
