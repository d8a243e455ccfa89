"""Run a real multi-node Slurm inside one directory, for demos, fault rehearsals and tests.

Belongs here: making, starting, breaking and removing that Slurm (munged, slurmctld and one slurmd
per node, all on the loopback device). Does not belong here: using a Slurm as a client (see
`hpctrain.slurm`), or anything about training runs.
"""
