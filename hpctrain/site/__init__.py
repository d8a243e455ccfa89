"""What a site is: the profile that facts about a cluster give, differences, what will not work.

Belongs here: judging facts. Pure. Does not belong here: reading a cluster (`hpctrain.slurm`) or a
node (`hpctrain.nodes`), files (`hpctrain.actions.site`).
"""
