"""Judging how a run spends its time and its memory. Pure: facts in, findings out.

Belongs here: the standard questions, one function each, and their order. Does not belong here:
reading a run directory and pricing changes (`hpctrain.actions.diagnose`), taking traces (the
trainer), adding them up (`hpctrain.telemetry.traces`), sentences about failures (`why`).
"""
