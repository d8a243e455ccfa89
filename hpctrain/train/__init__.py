"""The process on the GPUs: one rank of a training run on megatron-core.

Started as `python -m hpctrain.train RUN_DIRECTORY/train.json`, once per GPU; nobody imports it.
Belongs here: everything that touches torch and megatron-core. Does not belong here: deciding what
follows from an ending (see `hpctrain.supervise`) or which checkpoint is good (`checkpoints`).
"""
