"""The rungs of `make gpu`: from the driver to eight nodes, each with what to send back.

A rung is a list of checks on one size of machine; a higher one makes no sense while a lower one
fails. Belongs here: the rungs, the programs that they start, the report. Does not belong here: what
calibration makes of the report (`hpctrain calibrate`), tests of one GPU (`tests/gpu`), the
planner's jobs (`bench/one_gpu`). Needs nothing but `pip install -e .` in the checkout.
"""
