"""Read and set torch's random number generators, so that dropout continues after a resume."""

from __future__ import annotations

from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the state of the CPU's generator and, with a GPU, of the current GPU's."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators that a rank on `device` uses."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
