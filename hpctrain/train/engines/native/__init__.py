"""Train Hugging Face models with PyTorch's own data parallelism: FSDP (`fully_shard`) and DDP.

Importing this package imports nothing; its entry point is the module `assembly`.
"""
