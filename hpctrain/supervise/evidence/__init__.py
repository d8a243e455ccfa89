"""Collect evidence: watch a launch, probe nodes, read logs and stacks, query Slurm.

Belongs here: reading, with time limits. Does not belong here: what evidence means (`judge`).
"""
