"""Simulate a run before it is submitted: random failures, decisions by the supervisor's policy.

Belongs here: the inputs (`scenario`), one run (`simulated_run`), many of them and the comparison of
intervals and spares (`monte_carlo`). Random numbers come from a seed only;
everything else is pure. Does not belong here: the decisions
(`hpctrain.judge.policy`), closed forms (`hpctrain.plan.forecast`), text.
"""
