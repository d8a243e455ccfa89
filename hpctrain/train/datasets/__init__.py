"""Read datasets of all formats: the order of samples, and batches of them.

`hpctrain.train.data` is the entry point. Does not belong here: making datasets (see
`hpctrain.data.making`), what a model does with a batch.
"""
