"""Which CUDA a driver supports. There is no GPU here: libcuda is a stand-in with its call."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from hpctrain.train import software
from hpctrain.train.software import newest_cuda_of_driver


class Driver:
    """The call of libcuda, by its C signature; `code` is CUresult."""

    def __init__(self, number: int, code: int = 0) -> None:
        self.number, self.code = number, code

    def cuDriverGetVersion(self, place: Any) -> int:
        ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = self.number
        return self.code


def test_the_number_of_the_driver_is_a_version() -> None:
    assert newest_cuda_of_driver(Driver(13000)) == "13.0"
    assert newest_cuda_of_driver(Driver(12080)) == "12.8"


def test_without_an_answer_nothing_is_known() -> None:
    for library in (Driver(0), Driver(13000, code=100), object()):
        assert newest_cuda_of_driver(library) is None


def test_a_torch_for_cuda_is_asked_for_nothing_that_a_release_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Private functions of torch come and go: 2.11.0 for CUDA 13.0 has none for the driver."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(software, "_gpu_error", lambda: "no driver")
    facts = software.collect.__wrapped__()
    assert (facts.cuda_build, facts.nccl) == ("13.0", "2.28.9")
