"""What a run costs: days, failures, checkpoints, money; and what a budget can pay for.

Belongs here: everything that follows from a step time, a number of GPUs and what the profile says
of prices and failures. Does not belong here: how long a step takes (the cost model's business),
layouts, sentences for the terminal (`hpctrain.job.plan_text`).
"""
