"""Import transformers without network access and without packages that it does not need.

Belongs here: the import and the settings before it. Does not belong here: using it.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from typing import Any

from hpctrain.train.spared_imports import hidden

# Read when huggingface_hub is imported (constants.py): no run uses the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"


# Imported with any model for the losses of object detection (loss_utils.py), and with any saving
# for wrappers that are not used here (accelerate/utils/other.py). Both take seconds, and
# torchvision ends in an error if it was built for another torch.
_OPTIONAL = ("torchvision", "scipy", "deepspeed")


def hide_optional_packages() -> AbstractContextManager[None]:
    """Hide optional packages from imports inside the block, unless they are imported already."""
    return hidden(*_OPTIONAL)


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
