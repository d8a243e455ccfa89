"""hpctrain: plan, generate and supervise the training of large models on Slurm clusters."""

from __future__ import annotations

from hpctrain.version import __version__

__all__ = ["__version__"]
