"""What the trainer reads: datasets of all formats, their order, and batches of them.

`hpctrain.train.data` is the way in. Does not belong here: making datasets (see
`hpctrain.prepare`), what a model does with a batch.
"""
