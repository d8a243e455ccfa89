"""What differs between the supported versions of megatron-core, and what hpctrain uses of it.

Does not belong here: corrections of faults (see `hpctrain.train.engines.megatron.fixes`).
"""
