"""Compare variants of a run and recommend one. Pure: text and numbers in, documents out.

A comparison is several **trials**: short runs of the same spec, each with something changed (its
**variant**: another engine, another number of GPUs, another field). Belongs here: the words of
`--engines`, the short run of a spec, figures of a trial, agreement of losses, the recommendation,
scaling. Does not belong here: submitting, reading run directories, plots (`hpctrain.actions`) or
tables (`hpctrain.cli`).
"""
