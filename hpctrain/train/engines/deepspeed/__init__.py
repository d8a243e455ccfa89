"""Train Hugging Face models with DeepSpeed's ZeRO, with or without its pipeline.

Importing this package imports nothing; its entry point is the module `assembly`.
"""
