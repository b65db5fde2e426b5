"""The open division: honest plugins are scored, and each way to cheat is rejected with its reason."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tilewise.bench import Rejected, Settings
from tilewise.bench.plugins import score_plugin

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limits are Linux's")

HONEST = """
import numpy as np
from tilewise import Tensor, models, no_grad

def load(event, folder):
    model = models.pretrained("mlp")
    def answer(x):
        with no_grad():
            return np.asarray(model(Tensor(x)))
    return answer
"""


@pytest.fixture
def settings(quick: Settings) -> Settings:
    return replace(quick, runs=12)


def plugin(tmp_path: Path, code: str) -> Path:
    path = tmp_path / "plugin.py"
    path.write_text(code)
    return path


def rejection(tmp_path: Path, code: str, settings: Settings) -> Rejected:
    with pytest.raises(Rejected) as raised:
        score_plugin(plugin(tmp_path, code), "MLP_SPRINT", settings)
    return raised.value


def test_an_honest_plugin_gets_a_score_made_of_the_same_gains(tmp_path: Path, settings: Settings) -> None:
    score = score_plugin(plugin(tmp_path, HONEST), "MLP_SPRINT", settings)
    assert score.score == pytest.approx((score.speedup * score.memory_gain * score.size_gain) ** (1 / 3))
    assert score.size_gain == 1.0
    assert score.validation["accuracy"] > 0.97


def test_answers_memorised_for_the_public_images_are_rejected(tmp_path: Path, settings: Settings) -> None:
    code = """
import numpy as np
from tilewise.bench import TinyMLPerf
def load(event, folder):
    e = TinyMLPerf.event(event)
    known = {x.tobytes(): y for x, y in zip(e.public_inputs(), e.public_labels())}
    return lambda x: np.eye(10, dtype=np.float32)[[known.get(row.tobytes(), 0) for row in x]]
"""
    assert rejection(tmp_path, code, settings).code == "drawn inputs"


def test_a_fast_wrong_plugin_is_rejected(tmp_path: Path, settings: Settings) -> None:
    code = "import numpy as np\ndef load(e, f):\n    return lambda x: np.zeros((len(x), 10), np.float32)\n"
    assert rejection(tmp_path, code, settings).code == "below the floor"


def test_a_right_model_for_accuracy_and_a_wrong_one_for_speed_is_rejected(tmp_path: Path, settings: Settings) -> None:
    code = HONEST.replace("def answer(x):", "turn = [0]\n    def answer(x):\n        turn[0] += 1").replace(
        "with no_grad():", "if turn[0] > 20: return np.zeros((len(x), 10), np.float32)\n        with no_grad():"
    )
    assert rejection(tmp_path, code, settings).code in ("below the floor", "drawn inputs", "wrong answer")


def test_answers_that_depend_on_more_than_the_question_are_rejected(tmp_path: Path, settings: Settings) -> None:
    code = HONEST.replace("def answer(x):", "turn = [0]\n    def answer(x):\n        turn[0] += 1").replace(
        "return np.asarray(model(Tensor(x)))", "return np.asarray(model(Tensor(x))) + 0.05 * turn[0]"
    )
    assert "two different answers" in str(rejection(tmp_path, code, settings))


def test_work_that_goes_on_between_the_questions_is_rejected(tmp_path: Path, settings: Settings) -> None:
    code = (
        HONEST
        + """
import hashlib, threading
work = bytes(1 << 20)
def spin():
    while True:
        hashlib.sha256(work)
threading.Thread(target=spin, daemon=True).start()
"""
    )
    assert rejection(tmp_path, code, settings).code == "work outside timing"


def test_a_clock_changed_by_the_plugin_is_not_the_one_that_counts(tmp_path: Path, settings: Settings) -> None:
    """By its own clock this plugin takes no time at all, and its speed-up would be infinite."""
    code = HONEST + "\nimport time\ntime.perf_counter = time.time = time.monotonic = lambda: 0.0\ntime.sleep(0.0)\n"
    score = score_plugin(plugin(tmp_path, code), "MLP_SPRINT", settings)
    assert score.figures["entry"]["latency_s"]["p50"] > 0
    assert math.isfinite(score.speedup)


REACHING_OUT = [
    "open('/etc/passwd').read()",
    "open('/tmp/tilewise-written', 'w').write('x')",
    "os.system('true')",
    "os.fork()",
    "subprocess.run(['true'])",
    "socket.create_connection(('127.0.0.1', 80))",
    "ctypes.CDLL(None)",
]


def test_files_processes_and_sockets_are_out_of_reach(tmp_path: Path, settings: Settings) -> None:
    code = f"""
import ctypes, os, socket, subprocess
def load(event, folder):
    refused = 0
    for statement in {REACHING_OUT!r}:
        try:
            eval(statement)
        except PermissionError as error:
            refused += "may not" in str(error)
    raise RuntimeError(f"refused {{refused}}")
"""
    found = rejection(tmp_path, code, settings)
    assert found.code == "plugin failed"
    assert f"refused {len(REACHING_OUT)}" in str(found)


def test_memory_beyond_the_limit_is_refused(tmp_path: Path, settings: Settings) -> None:
    code = "import numpy as np\ndef load(event, folder):\n    return np.ones(1 << 30)\n"
    assert "MemoryError" in str(rejection(tmp_path, code, settings)).replace("_ArrayMemoryError", "MemoryError")


def test_a_plugin_that_dies_or_talks_nonsense_gets_a_sentence(tmp_path: Path, settings: Settings) -> None:
    for code in ("raise SystemExit(3)", "def load(e, f):\n    return lambda x: 1 / 0", "def load(e, f): return None"):
        assert rejection(tmp_path, code, settings).code == "plugin failed"


def test_bytes_that_are_no_answer_get_a_sentence(tmp_path: Path, settings: Settings) -> None:
    code = "import os\ndef load(e, f):\n    return lambda x: [os.write(n, b'x' * 64) for n in range(3, 9)] and x\n"
    code = (
        code.replace("os.write(n, b'x' * 64)", "write(n)")
        + """
def write(n):
    try:
        os.write(n, b"x" * 64)
    except OSError:
        pass
"""
    )
    assert rejection(tmp_path, code, settings).code == "plugin failed"
