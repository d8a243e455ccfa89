"""Diagnose how a run spends its time and memory. Pure: facts in, answers out.

Belongs here: the standard questions, one function each, and their order. Does not belong here:
reading a run directory and predicting changes (`hpctrain.actions.diagnose`), taking traces (the
trainer), summing them (`hpctrain.telemetry.traces`), explaining failures (`why`).
"""
