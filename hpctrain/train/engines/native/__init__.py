"""PyTorch's own data parallelism for Hugging Face's models: FSDP (`fully_shard`) and DDP.

Importing this package imports nothing; its module `assembly` is the way in.
"""
