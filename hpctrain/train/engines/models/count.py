"""`python -m hpctrain.train.engines.models.count CONFIG_JSON [DIGEST]`: count the model of a class
of transformers, or of the code beside that file if it has this digest.

Prints the fields of `model` that a spec has of it, as one JSON object. Modules are built on the
meta device: they have shapes and no memory. Belongs here: what can be read off such a module,
and comparing it with a spec. Does not belong here: models whose parts are known
(`hpctrain.plan.model.parameters`).
"""

from __future__ import annotations

import atexit
import importlib
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.architecture import RemoteCodeSpec
from hpctrain.spec.families import Config, config_digest
from hpctrain.spec.families.remote_code import own_class, unchanged_code
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.positions import parse_yaml
from hpctrain.train.engines.models.transformers_library import class_named, unset_weights

_HEAD_SIZE = 64
_NOT_FINITE = re.compile(r'"(-?Infinity|NaN)"')
_SETTINGS, _CLASS = "AutoConfig", "AutoModelForCausalLM"


def class_and_settings(config: dict[str, Any], code: RemoteCodeSpec | None) -> tuple[Any, Any]:
    """Return the class of a causal language model, and its settings.

    Raises InvalidInputError if transformers has none, or the code is another one.
    """
    # a copy, for its class may change what is nested; YAML knows these numbers as words
    config = json.loads(_NOT_FINITE.sub(r"\1", json.dumps(config)))
    own = None if code is None else _imported(config, code)
    settings_class = (own and own.get(_SETTINGS)) or class_named(_SETTINGS).for_model
    settings = settings_class(**config)
    if own is not None:
        return own[_CLASS], settings
    try:
        return class_named(_CLASS)._model_mapping[type(settings)], settings
    except KeyError:
        message = f"transformers has no causal language model of type {settings.model_type}"
        raise InvalidInputError([Problem(message)]) from None


def _imported(config: Config, code: RemoteCodeSpec) -> dict[str, Any]:
    """Import the classes of a model's own code, from a copy of the files that were compared."""
    files = unchanged_code(Path(code.directory), code.digest)
    package = f"hpctrain_remote_code_{code.digest[-12:]}"
    if package not in sys.modules:
        copy = Path(tempfile.mkdtemp(prefix="hpctrain-remote-code-"))
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        for name, content in files.items():
            (copy / name).write_bytes(content)
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(copy)]
    found = {name: own_class(config, name) for name in (_SETTINGS, _CLASS)}
    return {
        name: getattr(importlib.import_module(f"{package}.{place[0]}"), place[1])
        for name, place in found.items()
        if place is not None
    }


def count_file(file: str, digest: str | None = None) -> dict[str, Any]:
    """Count the model of a file, or of the code beside it. Raises InvalidInputError."""
    # as specs read it
    config, beside = parse_yaml(Path(file).read_text(), file).data, Path(file).absolute().parent
    if digest is None:
        return count(config)
    return count(config, RemoteCodeSpec.model_construct(directory=str(beside), digest=digest))


def count(config: dict[str, Any], code: RemoteCodeSpec | None = None) -> dict[str, Any]:
    """Count the model of a `config.json`. Raises InvalidInputError if transformers cannot."""
    try:
        return _counted(config, code)
    except InvalidInputError:
        raise
    except Exception as error:  # whatever a class does with values that it does not expect
        line = " ".join(str(error).split())
        message = f"transformers cannot build it: {type(error).__name__}: {line[:300]}"
        raise InvalidInputError([Problem(message)]) from error


def _counted(config: dict[str, Any], code: RemoteCodeSpec | None) -> dict[str, Any]:
    built, settings = class_and_settings(config, code)
    with torch.device("meta"), unset_weights():
        module = built._from_config(settings)
        module.tie_weights()
    text, words = settings.get_text_config(), module.get_input_embeddings().weight
    hidden = getattr(text, "hidden_size", None) or words.shape[1]
    most, output = getattr(text, "max_position_embeddings", None), module.get_output_embeddings()
    # the blocks: the list of modules with most parameters, inside of no other one
    lists = [[*one] for one in _outermost(module)]
    blocks = max(lists, key=lambda one: sum(map(_parameters, one)), default=[])
    weights = [id(one) for block in blocks for one in block.parameters()]
    if len(weights) != len({*weights}):
        blocks = []  # that share weights are gathered as one
    return {
        "layers": len(blocks) or 1,
        "hidden": hidden,
        # of the dense decoder as which it is priced
        "heads": hidden // math.gcd(hidden, _HEAD_SIZE),
        "vocab": words.shape[0],
        **({"max_seq": most} if isinstance(most, int) and most > 1 else {}),
        **({"tied": True} if output is not None and output.weight is words else {}),
        "counted": {
            "config": config_digest(config),
            "parameters": _parameters(module),
            "blocks": sorted({type(one).__name__ for one in blocks}),
            "recomputes": bool(module.supports_gradient_checkpointing),
            **({"remote_code": code.model_dump()} if code is not None else {}),
        },
    }


def check_count(model: ModelSpec, module: nn.Module) -> None:
    """Raise InvalidInputError if a built module is not the one of which the spec has the count."""
    if model.counted is None or model.counted.parameters == _parameters(module):
        return
    found, said = _parameters(module), model.counted.parameters
    message = f"{type(module).__name__} has {found:,} parameters, `model.counted` says {said:,}"
    hint = "this transformers is another one: `hpctrain init --model DIR` counts anew"
    raise InvalidInputError([Problem(message, hint=hint)])


def _parameters(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _outermost(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost(child)


if __name__ == "__main__":
    try:
        print(json.dumps(count_file(*sys.argv[1:])))
    except InvalidInputError as error:
        sys.exit(error.problems[0].message)
