"""Checkpoints: publishing under a fence, finding, verifying and keeping them."""
