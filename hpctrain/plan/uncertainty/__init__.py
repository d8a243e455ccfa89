"""How sure a prediction is: multipliers that a site can be off by, and what its own runs teach.

Belongs here: the Gaussian model of the logarithm of measured over predicted, its update, intervals
and the probability of fitting, with NumPy alone. Does not belong here: the cost model
(`hpctrain.plan.cost`), the prior's figures (`catalogue/uncertainty.yaml`), reading runs
(`hpctrain.site.own_runs`).
"""
