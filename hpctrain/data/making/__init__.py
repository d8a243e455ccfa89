"""Make datasets for the trainer from texts, conversations and images.

`make_plan` cuts the input into shards; `stages` makes them, and joins them into one dataset. Many
processes on many nodes can make shards, and finished shards survive an interruption.
`python -m hpctrain.data.making` is the program. Only Megatron's own writer of .bin/.idx files needs
torch. Does not belong here: reading datasets while training (`hpctrain.train.datasets`).
"""
