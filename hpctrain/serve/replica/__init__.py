"""The program in a replica's job: it starts an engine, says that it answers, and lets it leave.

It keeps the contract of a trainer (docs/trainer-contract.md), so that the supervisor of runs looks
after it: one task per node, records of life and of its end, requests by files and signals. Belongs
here: that program. Does not belong here: the words of an engine (`hpctrain.serve.engines`), the
router that asks the replica (`hpctrain.serve.router`), the supervisor.
"""
