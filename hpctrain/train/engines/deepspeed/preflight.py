"""Find what DeepSpeed lacks on this machine, before torch is imported and before any rank waits.

Belongs here: packages, tools and directories. Does not belong here: contradictions in a spec (see
`hpctrain.spec.engines.deepspeed`), building an operator (see `assembly`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hpctrain.base.errors import Problem
from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.records.layout import RunLayout

_TOOLS_HINT = "load a compiler's module, or build DeepSpeed's operators into the environment"


def engine_problems(config: DeepSpeedConfig, run: RunLayout) -> Iterator[Problem]:
    """Yield everything that is missing."""
    home = package_directory()
    if home is None:
        hint = "python -m pip install 'hpctrain[deepspeed]'"
        message = "deepspeed is not installed in this environment"
        yield Problem(message, hint=hint, node_dependent=True)
        return
    if not config.torch_adam and not _has_operator(home, "cpu_adam"):
        yield from _missing_tools("DeepSpeed's Adam for offloaded state")
    if config.nvme_path is not None:
        yield from _nvme_problems(home, Path(config.nvme_path))
    # The trainer makes DeepSpeed's settings from `train.json`. A change in the rendered file would
    # be ignored, which must not happen silently.
    written = [path.read_bytes() for path in run.ds_configs if path.is_file()]
    documents = []
    for text in written:
        with contextlib.suppress(ValueError):
            documents.append(json.loads(text))
    if written and ds_config(config) not in documents:
        message = "differs from train.json, and would be ignored"
        yield Problem(message, str(run.ds_config), hint="change the spec, and submit a new run")
    yield from _layout_problems(config)


def _layout_problems(config: DeepSpeedConfig) -> Iterator[Problem]:
    """Check what plans refuse (`hpctrain.plan.abilities`), for a file that was written by hand."""
    tp, model = config.tensor_parallel, config.model
    if tp > 1:
        if model.family != "llama" or config.zero_stage == 3 or config.lora is not None:
            yield Problem("weights are split over tp for whole Llamas, at ZeRO stages 0, 1 and 2")
        elif any(size % tp for size in (model.heads, model.key_value_heads, model.ffn_size)):
            message = f"tp {tp} divides not all of heads, key/value heads and columns of the MLP"
            yield Problem(message)
    if not config.pipeline_stages:
        return
    if sum(config.pipeline_stages) != model.layers:
        stages = " + ".join(map(str, config.pipeline_stages))
        yield Problem(f"stages of {stages} layers are not the model's {model.layers}")
    fits = config.zero_stage == 1 and model.family in ("gpt", "llama")
    plain = config.task == "language_modeling" and config.data_format == "tokens"
    if not fits or not plain or config.lora is not None:
        what = "whole GPTs and Llamas from tokens, at ZeRO stage 1"
        yield Problem(f"DeepSpeed's pipeline trains {what}")


def package_directory() -> Path | None:
    """Return where deepspeed is installed, without importing it (that would import torch)."""
    spec = importlib.util.find_spec("deepspeed")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _has_operator(home: Path, operator: str) -> bool:
    """Return whether the operator was built when DeepSpeed was installed (DS_BUILD_OPS etc.)."""
    return any(home.glob(f"ops/**/{operator}_op*.so"))


def _missing_tools(what: str) -> Iterator[Problem]:
    """Check for $CXX (else c++) and ninja, with which torch.utils.cpp_extension builds.

    ninja is installed with DeepSpeed, into the environment's bin, which may not be in PATH.
    """
    compiler = os.environ.get("CXX", "c++")
    for tool in (compiler, "ninja"):
        if shutil.which(tool) is None and importlib.util.find_spec(tool) is None:
            message = f"{what} is built where it runs, and {tool} is missing"
            yield Problem(message, hint=_TOOLS_HINT, node_dependent=True)


def _nvme_problems(home: Path, path: Path) -> Iterator[Problem]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        yield Problem("offload to nvme cannot write there", str(path), node_dependent=True)
    if _has_operator(home, "async_io"):
        return
    missing = list(_missing_tools("DeepSpeed's access to NVMe"))
    yield from missing
    if not missing and not has_libaio():
        message = "DeepSpeed's access to NVMe is built where it runs, and libaio.h is missing"
        hint = "install libaio's headers (libaio-dev, libaio-devel), or name them in CPATH"
        yield Problem(message, hint=hint, node_dependent=True)


def has_libaio() -> bool:
    """Return whether the compiler finds libaio's header."""
    command = [os.environ.get("CXX", "c++"), "-E", "-x", "c++", "-"]
    done = subprocess.run(command, input=b"#include <libaio.h>\n", capture_output=True, timeout=60)
    return done.returncode == 0
