"""What the driver says about a GPU. There is no GPU here: NVML is a stand-in with its calls."""

from __future__ import annotations

import ctypes
from typing import Any

from hpctrain.train.speed_check import GpuState, read_gpu_state


class Nvml:
    """The calls of libnvidia-ml, by their C signatures; `mask` holds the clock down."""

    def __init__(self, mask: int = 0, known: str = "GPU-5f3a", works: bool = True) -> None:
        self.mask, self.known, self.works = mask, known, works

    def nvmlInit_v2(self) -> int:
        return 0 if self.works else 9  # NVML_ERROR_DRIVER_NOT_LOADED

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return 0 if name.decode() == self.known else 6  # NVML_ERROR_NOT_FOUND

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, value: Any) -> int:
        return self._give(value, ctypes.c_uint, 1005, kind == 1)

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, value: Any) -> int:
        return self._give(value, ctypes.c_uint, 1980, kind == 1)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, mask: Any) -> int:
        return self._give(mask, ctypes.c_ulonglong, self.mask)

    def _give(self, place: Any, kind: Any, value: int, valid: bool = True) -> int:
        ctypes.cast(place, ctypes.POINTER(kind))[0] = value
        return 0 if valid else 2


def test_clocks_are_in_hz_and_reasons_have_names() -> None:
    state = read_gpu_state("5f3a", Nvml(mask=0x20 | 0x80))
    assert state == GpuState(1.005e9, 1.98e9, "thermal, power brake")


def test_the_limit_of_power_holds_down_every_gpu_at_full_load() -> None:
    assert read_gpu_state("GPU-5f3a", Nvml(mask=0x4 | 0x2 | 0x1)).slowdown == ""


def test_without_an_answer_nothing_is_known() -> None:
    for library in (Nvml(works=False), Nvml(known="GPU-other"), object()):
        assert read_gpu_state("5f3a", library) == GpuState()
    assert read_gpu_state("5f3a") == GpuState(), "no driver on this machine"
