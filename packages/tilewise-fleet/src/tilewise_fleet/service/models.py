"""Schemas of requests and responses for the OpenAPI page.

`checks.py` validates requests, with error messages for people; these models describe the same rules to programs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints

from tilewise.gpu.devices import H200

_WHOLE = Annotated[int, Field(ge=-(2**53) + 1, le=2**53 - 1, strict=True)]
_WORD = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:+=-]{1,120}$")]
_PROBLEM: dict[str, JsonValue] = {"family": "matmul", "dtype": "bf16", "m": 512, "n": 4096, "k": 1024}
_TILE: dict[str, JsonValue] = {"block_m": 64, "block_n": 64, "block_k": 32, "warps": 4, "stages": 3, "group": 8}


class Closed(BaseModel):
    """A model without additional fields."""

    model_config = ConfigDict(extra="forbid")


class MachineIdentity(Closed):
    """The kind of a device, and the name under which its measurements are stored."""

    kind: Literal["cpu", "triton"] = Field(examples=["triton"])
    identity: Annotated[str, StringConstraints(pattern=r"^[ -~]{1,120}$")] = Field(examples=["NVIDIA H200"])
    details: dict[str, Any] = Field(default_factory=dict, description="Versions and sizes, stored with measurements.")
    features: dict[str, _WHOLE] = Field(
        default_factory=dict, description="The machine_ columns of a CPU, for the cost model."
    )
    shared_bytes: int = Field(
        default=H200.shared_bytes_per_block,
        ge=1,
        description="Shared memory per block; limits the configurations of a family.",
    )


class ChooseRequest(Closed):
    """One problem, or several problems with the same device and configurations."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "device": {"kind": "triton", "identity": "NVIDIA H200"},
                    "problem": _PROBLEM,
                    "configs": [_TILE],
                }
            ]
        }
    )
    device: MachineIdentity
    problem: dict[str, _WHOLE | _WORD] | None = None
    problems: list[dict[str, _WHOLE | _WORD]] | None = Field(default=None, min_length=1, max_length=64)
    configs: list[dict[str, _WHOLE]] | None = Field(
        default=None,
        min_length=1,
        max_length=5000,
        description="The default first; if left out, the configurations of the family.",
    )


class Choice(BaseModel):
    """A configuration, its source, and the probability that it is within one per cent of the best."""

    config: dict[str, int]
    source: Literal["measured", "model", "default"]
    sure: float | None
    measurements: int
    runtime_ns: float | None
    default_ns: float | None


class Choices(BaseModel):
    choices: list[Choice]


class Timing(Closed):
    config: dict[str, _WHOLE] = Field(examples=[_TILE])
    runtime_ns: float = Field(examples=[18500.0])


class Batch(Closed):
    """Configurations that were timed together with the default."""

    uid: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_/.-]{8,80}$")] = Field(
        description="Chosen by the sender. A batch that is sent again, after a lost response, is not counted twice.",
        examples=["my-batch-0001"],
    )
    problem: dict[str, _WHOLE | _WORD] = Field(examples=[_PROBLEM])
    default_ns: float = Field(examples=[21000.0])
    timings: list[Timing] = Field(min_length=1, max_length=1000)


class Measurements(Closed):
    device: MachineIdentity
    batches: list[Batch] = Field(min_length=1, max_length=64)


class MeasurementCounts(BaseModel):
    """The number of batches and timings that were committed to the store."""

    batches: int
    timings: int


class ServiceHealth(BaseModel):
    status: str
    store: str
    waiting: int
