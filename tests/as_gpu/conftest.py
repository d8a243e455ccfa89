"""Fixtures of the tests that see the GPU path from a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the megatron extra")

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

# Before any test module imports megatron-core: the CPU layer must come first.
from fresh_process import IMPORTS, FreshProcess

import hpctrain.train.engines.megatron.assembly

assert hpctrain.train.engines.megatron.assembly is not None


@pytest.fixture(scope="session")
def engine_process() -> Iterator[FreshProcess]:
    """A process in which TransformerEngine is the stub."""
    stubs = Path(__file__).parents[1] / "stubs"
    process = FreshProcess([stubs], IMPORTS)
    yield process
    process.close()
