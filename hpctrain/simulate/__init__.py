"""Playing a run before it is submitted: failures by chance, decisions by the supervisor's policy.

Belongs here: what is played (`scenario`), one run (`trial`), many of them (`trials`), the choice
(`choice`). Random numbers come from a seed only; everything else is pure. Does not belong here:
the decisions (`hpctrain.supervise.judge.policy`), closed forms (`hpctrain.plan.forecast`), text.
"""
