"""Start ranks below srun: agents, and Nsight Systems."""
