"""The connection to a Ray cluster, and the cluster's slots: the devices on which kernels can be measured.

A node declares its devices with custom resources when it is started: `ray start --resources '{"gpu:H200": 1}'`, or
`cpu:avx2` and so on. Each such resource of a node is one slot.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from tilewise.errors import ConfigurationError, UnavailableError

_PROBE_SECONDS = 5.0  # arbitrary; a reachable host accepts a connection much faster
_PREFIX = {"cpu": "cpu:", "triton": "gpu:"}
# Fraction of a slot's resource that one actor reserves. It is small so that several drivers can share a slot; a lock
# (see `device_lock.py`) keeps their timings apart.
RESOURCE_FRACTION = 0.01


@dataclass(frozen=True)
class SlotAddress:
    """One device of one node of the cluster, on which kernels can be measured."""

    node: str  # the node's id in Ray
    address: str
    resource: str
    device: int = 0  # index among `devices`, on a node with several GPUs
    devices: int = 1

    @property
    def label(self) -> str:
        """Name of the slot in tables and events."""
        index = f" {self.device}" if self.devices > 1 else ""
        return f"{self.address} {self.resource}{index}"


def require_ray() -> Any:
    """Import and return Ray; raise `UnavailableError` if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this, Ray hides the machine's GPUs from actors that reserve none of its GPU resources.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise UnavailableError("this needs Ray: pip install 'tilewise-fleet[ray]'") from None
    return ray


def join(address: str, namespace: str = "tilewise") -> Any:
    """Connect this process to the cluster at `address`, and return Ray."""
    import logging

    ray = require_ray()
    if not ray.is_initialized():
        try:
            _probe(address)
            ray.init(
                address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR,
                configure_logging=False,
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError, OSError, OverflowError) as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise ConfigurationError(
                f"There is no Ray cluster at {address!r} ({reason}); `tilewise fleet up` starts one on this machine, "
                f"and docs/fleet.md says how to start others."
            ) from None
    return ray


def _probe(address: str) -> None:
    """Raise at once if nothing listens at the address; `ray.init` would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()


def slots(ray: Any, kind: str) -> list[SlotAddress]:
    """List the slots for devices of `kind` on living nodes: one per GPU, and a machine's CPU as one."""
    addresses = []
    for node in ray.nodes():
        if node.get("Alive"):
            for resource, amount in sorted(node.get("Resources", {}).items()):
                if resource.startswith(_PREFIX[kind]) and amount > 0:
                    count = max(1, int(amount)) if kind == "triton" else 1
                    fields = (node["NodeID"], node["NodeManagerAddress"], resource)
                    addresses += [SlotAddress(*fields, device, count) for device in range(count)]
    return addresses


def no_slots(kind: str) -> ConfigurationError:
    """Return the error for a cluster without slots for devices of `kind`, which says how to add one."""
    example = "cpu:avx2" if kind == "cpu" else "gpu:H200"
    return ConfigurationError(
        f"No node of this cluster offers a slot for {kind}; start nodes with "
        f"--resources '{{\"{example}\": 1}}' (see docs/fleet.md)."
    )
