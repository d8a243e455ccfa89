"""Runs for other programs, and plans for clusters without Slurm. One way."""
