"""Write checkpoints: when one is due, the writer process, digests, publishing."""
