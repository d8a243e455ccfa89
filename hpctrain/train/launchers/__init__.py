"""Processes between srun and a rank: torchelastic agents and Nsight Systems."""
