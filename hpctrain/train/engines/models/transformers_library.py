"""Import transformers without network access and without packages that it does not need.

Belongs here: the import and the settings before it. Does not belong here: using it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Read when huggingface_hub is imported (constants.py): no run uses the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"


# Imported with any model for the losses of object detection (loss_utils.py), and with any saving
# for wrappers that are not used here (accelerate/utils/other.py). Both take seconds, and
# torchvision ends in an error if it was built for another torch.
_OPTIONAL = ("torchvision", "scipy", "deepspeed")


@contextmanager
def hide_optional_packages() -> Iterator[None]:
    """Hide optional packages from imports inside the block, unless they are imported already."""
    hidden = [name for name in _OPTIONAL if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def class_named(name: str) -> Any:
    """Return a class of transformers, which imports the class's module on its first use."""
    with hide_optional_packages():
        library = importlib.import_module("transformers")
        library.utils.logging.disable_progress_bar()  # a job's log is not an interactive terminal
        library.utils.logging.set_verbosity_error()
        return getattr(library, name)


def unset_weights() -> Any:
    """Return a context in which modules are built without drawing numbers for their weights."""
    with hide_optional_packages():
        return importlib.import_module("transformers.initialization").no_init_weights()
