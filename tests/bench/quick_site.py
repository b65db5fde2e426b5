"""A board served as ever, but for what a worker measures: a made-up score after a moment, so that thousands of entries
come to an end. Queue, leases, supervision and ledger are the real ones.

`python -m tests.bench.quick_site compete serve …` is the server; its workers are `… quick_site worker …`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.bench.test_board import made_up_score
from tilewise_arena import worker
from tilewise_arena.server import workers

_SECONDS = 0.02


def _fake_measurement(*_: Any) -> tuple[str, dict[str, Any], str]:
    time.sleep(_SECONDS)
    return "scored", made_up_score().as_dict(), ""


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        worker._measure_entry = _fake_measurement
        worker.consider_record = lambda *_: False
        worker.main()
        return
    from tilewise.cli.app import main as command_line

    workers.MODULE = ("tests.bench.quick_site", "worker")
    command_line()


if __name__ == "__main__":
    main()
