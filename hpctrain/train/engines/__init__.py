"""The engines of the trainer, one package each; entry point: its `assembly`.

Megatron-LM is a whole program, so its entry point is `megatron_lm.program`. `models` is shared by
the engines that train Hugging Face's classes.
"""
