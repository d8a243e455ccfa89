"""A trainer that computes nothing and keeps the trainer's contract, to rehearse large launches.

Hundreds of its ranks start on two cores, because most of them import nothing: the first rank of
each node writes for the others of its node. Belongs here: that program. Does not belong here: the
contract in words (docs/trainer-contract.md), or choosing this trainer: no job script names it, and
only an interpreter made for a sandbox starts it (see `hpctrain.sandbox.stand_in_interpreter`).
"""
