"""megatron-core: 3D parallelism for GPT and Llama, with and without experts.

Importing this package imports nothing; its module `assembly` is the way in.
"""
