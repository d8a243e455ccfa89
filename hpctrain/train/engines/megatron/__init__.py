"""Train GPT, Llama and BERT with megatron-core: 3D parallelism, with and without experts.

Importing this package imports nothing; its entry point is the module `assembly`.
"""
