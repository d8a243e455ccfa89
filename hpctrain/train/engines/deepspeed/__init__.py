"""DeepSpeed's ZeRO for Hugging Face's models.

Importing this package imports nothing; its module `assembly` is the way in.
"""
