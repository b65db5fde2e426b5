"""The GPU's clock, temperature, power and reasons for throttling, read from NVIDIA's management library by ctypes.

Nothing to install, and nothing is ever set: a reading that cannot be had is left out.
"""

from __future__ import annotations

import ctypes

_SM_CLOCK, _MEMORY_CLOCK, _TEMPERATURE_GPU = 1, 2, 0
# Anything but "idle" (1) and "application clocks" (2) slows the GPU for a reason of its own.
_HARMLESS = 0x1 | 0x2


class GpuWatch:
    """Readings of the first GPU."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._device = ctypes.c_void_p()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            ready = library.nvmlInit_v2() == 0
            if ready and library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)) == 0:
                self._library = library
        except (OSError, AttributeError):
            self._library = None

    def driver(self) -> str:
        """The driver's version, or "unknown"."""
        if self._library is None:
            return "unknown"
        text = ctypes.create_string_buffer(96)
        found = self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)) == 0
        return text.value.decode() if found else "unknown"

    def name(self) -> str:
        """What the GPU calls itself, without starting CUDA; empty where it cannot be had."""
        text = ctypes.create_string_buffer(96)
        if self._library is None or self._library.nvmlDeviceGetName(self._device, text, ctypes.c_uint(96)) != 0:
            return ""
        return text.value.decode(errors="replace")

    def capability(self) -> int | None:
        """The compute capability as a number such as 90, without starting CUDA; None where it cannot be had."""
        if self._library is None:
            return None
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            call = self._library.nvmlDeviceGetCudaComputeCapability
            known = call(self._device, ctypes.byref(major), ctypes.byref(minor)) == 0
        except AttributeError:
            return None
        return major.value * 10 + minor.value if known else None

    def read(self) -> dict[str, float]:
        """sm_mhz, memory_mhz, celsius, watts and throttled (1 if something holds the clock down)."""
        if self._library is None:
            return {}
        found: dict[str, float] = {}
        self._number(found, "sm_mhz", "nvmlDeviceGetClockInfo", _SM_CLOCK)
        self._number(found, "memory_mhz", "nvmlDeviceGetClockInfo", _MEMORY_CLOCK)
        self._number(found, "celsius", "nvmlDeviceGetTemperature", _TEMPERATURE_GPU)
        self._number(found, "watts", "nvmlDeviceGetPowerUsage", scale=1e-3)
        reasons = ctypes.c_ulonglong()
        try:
            if self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._device, ctypes.byref(reasons)) == 0:
                found["throttled"] = float(bool(reasons.value & ~_HARMLESS))
        except AttributeError:
            pass
        return found

    def _number(
        self, found: dict[str, float], name: str, call: str, which: int | None = None, scale: float = 1
    ) -> None:
        value = ctypes.c_uint()
        arguments = (self._device, ctypes.byref(value)) if which is None else (self._device, which, ctypes.byref(value))
        try:
            if getattr(self._library, call)(*arguments) == 0:
                found[name] = value.value * scale
        except AttributeError:
            pass
