"""Copies a run's metrics to TensorBoard and W&B; a program of its own, beside training.

The supervisor starts it in the job (`--follow`), and `hpctrain export` on a login node. It reads
`metrics.jsonl` and never touches what trains. Belongs here: one continuous curve from rows with
rewinds (`continuous`, pure), how far it is written, and the sinks. tensorboard and wandb are
imported in `event_files` and `wandb_run` only. Does not belong here: starting the program
(`hpctrain.supervise`, `hpctrain.export.metrics`), settings (`hpctrain.records.tracking`).
"""
