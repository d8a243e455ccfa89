"""A night of a service on a real Slurm, in minutes: every way in which replicas leave, under load.

`python -m bench.serving_night` prints what each event did to the requests (docs/serving-night.md).
"""
