"""Ray as tilewise uses it: found if it is installed, joined quietly, and its nodes as slots to measure in.

A node says what it offers by custom resources when it is started: `ray start --resources '{"gpu:H200": 1}'`, or
`cpu:avx2` and so on. Each such resource of a node is one slot.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from tilewise.errors import ConfigurationError, UnavailableError

_KNOCK_SECONDS = 5.0
_PREFIX = {"cpu": "cpu:", "triton": "gpu:"}
SHARE = 0.01  # of a slot's resource that a driver's actor holds: others may join; what is timed is kept apart by a lock


@dataclass(frozen=True)
class SlotPlace:
    """One device of one node."""

    node: str  # Ray's id of it
    address: str
    resource: str
    device: int = 0  # of `devices`, where a node has several GPUs
    devices: int = 1

    @property
    def label(self) -> str:
        which = f" {self.device}" if self.devices > 1 else ""
        return f"{self.address} {self.resource}{which}"


def require_ray() -> Any:
    """Ray, or a sentence that says how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without GPUs of Ray's keep the machine's
    try:
        import ray
    except ImportError:
        raise UnavailableError("this needs Ray: pip install 'tilewise-fleet[ray]'") from None
    return ray


def join(address: str, namespace: str = "tilewise") -> Any:
    """Connect this process to the cluster at `address`; gives Ray."""
    import logging

    ray = require_ray()
    if not ray.is_initialized():
        try:
            _knock(address)
            ray.init(
                address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR,
                configure_logging=False,
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError, OSError, OverflowError) as error:
            said = str(error).strip().splitlines()[0][:200]
            raise ConfigurationError(
                f"There is no Ray cluster at {address!r} ({said}); `tilewise fleet up` starts one on this machine, and "
                f"docs/fleet.md says how to start others."
            ) from None
    return ray


def _knock(address: str) -> None:
    """Ray tries for minutes to reach an address where nobody is; this takes a moment."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


def slots(ray: Any, kind: str) -> list[SlotPlace]:
    """The slots of living nodes for devices of `kind`: a GPU resource of 4 as four, while a machine's CPU is one."""
    found = []
    for node in ray.nodes():
        if node.get("Alive"):
            for name, amount in sorted(node.get("Resources", {}).items()):
                if name.startswith(_PREFIX[kind]) and amount > 0:
                    count = max(1, int(amount)) if kind == "triton" else 1
                    where = (node["NodeID"], node["NodeManagerAddress"], name)
                    found += [SlotPlace(*where, device, count) for device in range(count)]
    return found


def no_slots(kind: str) -> ConfigurationError:
    example = "cpu:avx2" if kind == "cpu" else "gpu:H200"
    return ConfigurationError(
        f"No node of this cluster offers a slot for {kind}; start nodes with "
        f"--resources '{{\"{example}\": 1}}' (see docs/fleet.md)."
    )
