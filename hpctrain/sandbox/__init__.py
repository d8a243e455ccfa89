"""A real multi-node Slurm inside one directory: for demos, rehearsals and tests.

Belongs here: making, starting, breaking and removing that Slurm (munged, slurmctld and one slurmd
per node, all on the loopback device). Does not belong here: talking to a Slurm as a user of it
(see `hpctrain.slurm`), or anything about training runs.
"""
