"""Making datasets: from texts, conversations and images to what the trainer reads.

In three stages, so that many processes on many nodes can take part and nothing is lost when they
end: a plan that cuts the input into shards, the shards, and one dataset of all of them.
`hpctrain.prepare` is the program. Nothing here needs torch but Megatron's own writer of
its files. Does not belong here: reading datasets while training (`hpctrain.train.datasets`).
"""
