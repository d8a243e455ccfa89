"""Read the state of this rank's GPU from NVIDIA's driver: SM clock, and what holds it down.

Uses NVML (libnvidia-ml, a part of the driver) by ctypes: torch needs another package for it, and
nvidia-smi takes a second. Belongs here: the calls. Does not belong here: judging clocks (see
`slow_parts`), errors of GPUs (`hpctrain.supervise.evidence.node_checks`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

# nvml.h: nvmlClockType_t, and nvmlClocksEventReasons. Idle, application clocks and the power cap
# are left out: a GPU at full load is at its power cap.
_CLOCK_SM = 1
_REASONS = {
    0x08: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
_HZ_PER_MHZ = 1e6


@dataclass(frozen=True)
class GpuState:
    """SM clocks in Hz, and the reasons that hold the clock down, "" for none."""

    clock_hz: float | None = None
    highest_clock_hz: float | None = None
    slowdown: str = ""


def read_gpu_state(uuid: str, library: Any = None) -> GpuState:
    """Read the state of the GPU with this UUID; everything unknown where NVML cannot be used.

    `uuid`: as torch prints it, without `GPU-`. Returns within milliseconds.
    """
    try:
        nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return GpuState()
        handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
            return GpuState()
        clock = _number(nvml.nvmlDeviceGetClockInfo, handle, _CLOCK_SM)
        highest = _number(nvml.nvmlDeviceGetMaxClockInfo, handle, _CLOCK_SM)
        mask = ctypes.c_ulonglong()
        # the name of before driver 535, which newer drivers export, too
        if nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(mask)) != 0:
            mask.value = 0
    except (OSError, AttributeError):
        return GpuState()
    found = [words for bit, words in _REASONS.items() if mask.value & bit]
    return GpuState(clock, highest, ", ".join(found))


def _number(function: Any, handle: ctypes.c_void_p, kind: int) -> float | None:
    value = ctypes.c_uint()
    if function(handle, kind, ctypes.byref(value)) != 0:
        return None
    return value.value * _HZ_PER_MHZ
