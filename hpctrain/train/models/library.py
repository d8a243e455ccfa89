"""transformers, imported so that it suits a trainer: nothing is fetched, nothing else comes along.

Belongs here: the import and what has to be set before it. Does not belong here: using it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Read when huggingface_hub is imported (constants.py): no run asks the network for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Losses of object detection would import torchvision along with any model (loss_utils.py).

    That takes each rank a second, and ends in an error where it was built for another torch.
    """
    hidden = "torchvision" not in sys.modules
    if hidden:
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torchvision"]


def class_named(name: str) -> Any:
    """A class of transformers, which imports its module when it is first asked for."""
    with _without_torchvision():
        library = importlib.import_module("transformers")
        library.utils.logging.disable_progress_bar()  # nobody watches a job's log line by line
        library.utils.logging.set_verbosity_error()
        return getattr(library, name)


def unset_weights() -> Any:
    """A context in which modules are built without drawing numbers for their weights."""
    with _without_torchvision():
        return importlib.import_module("transformers.initialization").no_init_weights()
