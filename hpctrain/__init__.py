"""hpctrain: plan, generate and supervise the training of large models on Slurm clusters.

    import hpctrain
    run = hpctrain.submit("examples/gpt175b.yaml", "a100x64")
    run.wait()

The names below are imported when they are used, so that `import hpctrain` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.version import __version__

if TYPE_CHECKING:
    from hpctrain.handle import Run, make_plan, open_run
    from hpctrain.handle import submit_run as submit
    from hpctrain.runs.state import RunState
    from hpctrain.trials.compare import compare, open_comparison, scale
    from hpctrain.trials.sweep import Sweep, open_sweep, sweep

__all__ = [
    "Run",
    "RunState",
    "Sweep",
    "__version__",
    "compare",
    "make_plan",
    "open_comparison",
    "open_run",
    "open_sweep",
    "scale",
    "submit",
    "sweep",
]

_PLACES = {
    "Run": ("hpctrain.handle", "Run"),
    "RunState": ("hpctrain.runs.state", "RunState"),
    "compare": ("hpctrain.trials.compare", "compare"),
    "scale": ("hpctrain.trials.compare", "scale"),
    "open_comparison": ("hpctrain.trials.compare", "open_comparison"),
    "open_run": ("hpctrain.handle", "open_run"),
    "make_plan": ("hpctrain.handle", "make_plan"),
    "submit": ("hpctrain.handle", "submit_run"),
    "Sweep": ("hpctrain.trials.sweep", "Sweep"),
    "sweep": ("hpctrain.trials.sweep", "sweep"),
    "open_sweep": ("hpctrain.trials.sweep", "open_sweep"),
}


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    import importlib

    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)
