"""The training process: one rank of a run.

Started as `python -m hpctrain.train RUN_DIRECTORY/train.json`, once per GPU; nothing imports it.
Belongs here: everything that uses torch and the engines. Does not belong here: reacting to the end
of a rank (see `hpctrain.supervise`), choosing a checkpoint (see `hpctrain.checkpoints`).
"""
