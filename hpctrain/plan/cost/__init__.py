"""What a layout costs: seconds per step and bytes per GPU, for any number of layouts at once.

Every field of a case is a NumPy array or a plain number, and every formula is written with
operators that broadcast. One call prices one layout, all layouts of a search, or all rows of a
table of measurements; there is no second implementation for any of them.

Belongs here: the physics and its constants' meaning. Does not belong here: which layouts exist
(`hpctrain.plan.search.space`), the constants' values (`hpctrain/spec/catalogue`), files, torch.
"""
