"""Short measurements for the tests: few samples, any spread, fixed draws."""

from __future__ import annotations

from typing import Any

import pytest

from tilewise.bench import Settings


@pytest.fixture
def quick() -> Settings:
    return Settings(
        sample_seconds=2e-4, runs=12, most_runs=12, widest_interval=1e9, drawn_inputs=128, seed=1, time_limit=60
    )


@pytest.fixture
def mlp_recipe() -> dict[str, Any]:
    return {
        "tilewise": 1,
        "event": "MLP_SPRINT",
        "name": "bytes",
        "steps": [{"step": "backend", "name": "native"}, {"step": "quantize", "samples": 128}],
    }
