"""How a spec is laid out on a cluster: layout, batch, stages, memory, reasons. Pure arithmetic.

Belongs here: the numbers and where they come from. Does not belong here: files, the clock,
Slurm, torch, or the input of an engine (see `hpctrain.engines`).
"""
