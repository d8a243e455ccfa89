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


# Imported along with any model for the losses of object detection (loss_utils.py), and with any
# saving for wrappers that are not used here (accelerate/utils/other.py). Both take seconds, and
# torchvision ends in an error where it was built for another torch.
_NOT_NEEDED = ("torchvision", "scipy", "deepspeed")


@contextmanager
def alone() -> Iterator[None]:
    """transformers finds no packages but those that it needs, or that are imported already."""
    hidden = [name for name in _NOT_NEEDED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def class_named(name: str) -> Any:
    """A class of transformers, which imports its module when it is first asked for."""
    with alone():
        library = importlib.import_module("transformers")
        library.utils.logging.disable_progress_bar()  # nobody watches a job's log line by line
        library.utils.logging.set_verbosity_error()
        return getattr(library, name)


def unset_weights() -> Any:
    """A context in which modules are built without drawing numbers for their weights."""
    with alone():
        return importlib.import_module("transformers.initialization").no_init_weights()
