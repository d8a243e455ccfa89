"""What differs between the supported versions of megatron-core, and what hpctrain uses of it.

Belongs here: one module per version with everything that differs, the table of versions, the list
of used names, the check at the start of a rank. Does not belong here: corrections of faults (see
`hpctrain.train.engines.megatron.fixes`).
"""
