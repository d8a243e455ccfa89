"""What a run writes and asks of its site: files, metadata operations, Slurm RPCs, bytes. Pure."""
