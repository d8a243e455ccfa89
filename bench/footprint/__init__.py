"""What a run really does to a file system and to Slurm, counted by strace.

`python -m bench.footprint` prints it beside what `hpctrain footprint` predicts.
"""
