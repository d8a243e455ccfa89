"""Start ranks below srun: torchelastic agents, and Nsight Systems."""
