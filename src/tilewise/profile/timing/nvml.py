"""Read the GPU's clocks, temperature, power and throttle reasons from NVIDIA's management library (NVML) by ctypes.

The library comes with the driver, and only getters are called. Values that are not available are omitted.
"""

from __future__ import annotations

import ctypes

_SM_CLOCK, _MEMORY_CLOCK, _TEMPERATURE_GPU = 1, 2, 0
# Throttle reasons that do not mean a problem: "GPU idle" (1) and "application clocks setting" (2).
_HARMLESS = 0x1 | 0x2


class GpuWatch:
    """Reads the state of the first GPU."""

    def __init__(self) -> None:
        """Load the library; without it, all readings are empty."""
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
        """Version of the driver, or "unknown"."""
        if self._library is None:
            return "unknown"
        text = ctypes.create_string_buffer(96)
        success = self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)) == 0
        return text.value.decode() if success else "unknown"

    def name(self) -> str:
        """Product name of the GPU, read without initializing CUDA; empty if not available."""
        text = ctypes.create_string_buffer(96)
        if self._library is None or self._library.nvmlDeviceGetName(self._device, text, ctypes.c_uint(96)) != 0:
            return ""
        return text.value.decode(errors="replace")

    def capability(self) -> int | None:
        """Compute capability as a number such as 90, read without initializing CUDA; None if not available."""
        if self._library is None:
            return None
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            call = self._library.nvmlDeviceGetCudaComputeCapability
            success = call(self._device, ctypes.byref(major), ctypes.byref(minor)) == 0
        except AttributeError:
            return None
        return major.value * 10 + minor.value if success else None

    def read(self) -> dict[str, float]:
        """Read sm_mhz, memory_mhz, celsius, watts and throttled (1 if the clock is reduced for any harmful reason)."""
        if self._library is None:
            return {}
        state: dict[str, float] = {}
        self._read_number(state, "sm_mhz", "nvmlDeviceGetClockInfo", _SM_CLOCK)
        self._read_number(state, "memory_mhz", "nvmlDeviceGetClockInfo", _MEMORY_CLOCK)
        self._read_number(state, "celsius", "nvmlDeviceGetTemperature", _TEMPERATURE_GPU)
        self._read_number(state, "watts", "nvmlDeviceGetPowerUsage", scale=1e-3)
        reasons = ctypes.c_ulonglong()
        try:
            if self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._device, ctypes.byref(reasons)) == 0:
                state["throttled"] = float(bool(reasons.value & ~_HARMLESS))
        except AttributeError:
            pass
        return state

    def _read_number(
        self, state: dict[str, float], name: str, call: str, selector: int | None = None, scale: float = 1
    ) -> None:
        """Call an NVML getter and store its scaled value in `state`; do nothing if the getter fails."""
        value = ctypes.c_uint()
        selectors = () if selector is None else (selector,)
        try:
            if getattr(self._library, call)(self._device, *selectors, ctypes.byref(value)) == 0:
                state[name] = value.value * scale
        except AttributeError:
            pass
