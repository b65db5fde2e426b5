"""The open division: honest plugins are scored, and each way to cheat is rejected with its reason."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.waiting import PATIENCE, until
from tilewise.bench import Rejected, Settings, TooNoisy, reference_recipe
from tilewise.bench.events import TinyMLPerf
from tilewise.bench.leaderboard import LocalLeaderboard
from tilewise.bench.runner import baseline
from tilewise.bench.scoring import Score, check_consistent
from tilewise.errors import UnavailableError
from tilewise_arena.board import open_board
from tilewise_arena.sandbox import bubblewrap, host, score_plugin
from tilewise_arena.sandbox.host import Submitted
from tilewise_arena.sandbox.score import Answers, _ask_interleaved, _check_baseline, _check_floor, questions_for

pytestmark = pytest.mark.skipif(bool(bubblewrap.unavailable_reason()), reason=bubblewrap.unavailable_reason())

T = TypeVar("T")
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
BY_HAND = """
import numpy as np
from tilewise import models

def load(event, folder):
    arrays = [tensor.data for _, tensor in models.pretrained("mlp").named_tensors()]
    layers = [(np.ascontiguousarray(arrays[i].T), arrays[i + 1]) for i in range(0, len(arrays), 2)]
    def answer(x):
        for at, (weight, bias) in enumerate(layers):
            x = x @ weight + bias
            x = np.maximum(x, 0) if at + 1 < len(layers) else x
        return x
    return answer
"""


def completed(text: str) -> tuple[str, str]:
    """Return a cheat's whole text, and that of the honest plugin with the same algorithm.

    The line `# honest by hand` stands for the honest plugin's text in plain NumPy, `# honest` for the usual one.
    """
    honest = BY_HAND if "# honest by hand" in text else HONEST
    return text.replace("# honest by hand", honest).replace("# honest", honest), honest


@pytest.fixture
def settings(quick: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(host, "_ANSWER_SECONDS", PATIENCE)  # a sandbox may wait a minute for a core to start on
    return replace(quick, runs=12)


def plugin(tmp_path: Path, code: str) -> Path:
    path = tmp_path / "plugin.py"
    path.write_text(code)
    return path


def scored(tmp_path: Path, code: str, settings: Settings) -> Score:
    """Score a plugin; where the machine is too busy for that, skip the test, which is named at the end of the run."""
    try:
        return score_plugin(plugin(tmp_path, code), "MLP_SPRINT", settings)
    except TooNoisy as error:
        pytest.skip(str(error))


def rejection(tmp_path: Path, code: str, settings: Settings) -> Rejected:
    with pytest.raises(Rejected) as raised:
        scored(tmp_path, code, settings)
    return raised.value


def test_an_honest_plugin_gets_a_score_made_of_the_same_gains(tmp_path: Path, settings: Settings) -> None:
    score = scored(tmp_path, HONEST, settings)
    assert score.score == pytest.approx((score.speedup * score.memory_gain * score.size_gain) ** (1 / 3))
    assert 0.99 < score.size_gain < 1.0  # its own code counts
    assert score.validation["accuracy"] > 0.95


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


def test_a_clock_changed_by_the_plugin_is_not_the_one_that_counts(tmp_path: Path, settings: Settings) -> None:
    """By its own clock this plugin takes no time at all, and its speed-up would be infinite."""
    code = HONEST + "\nimport time\ntime.perf_counter = time.time = time.monotonic = lambda: 0.0\ntime.sleep(0.0)\n"
    score = scored(tmp_path, code, settings)
    assert score.figures["entry"]["latency_s"]["p50"] > 0
    assert math.isfinite(score.speedup)


REACHING_OUT = [
    "open('/etc/passwd').read()",
    "open('/plugin/written', 'w')",
    "open('/site/tilewise/written', 'w')",
    "open('/proc/self/clear_refs', 'w')",
    "os.rename('/tmp/a', '/plugin/a')",
    "os.link('/tmp/a', '/tmp/b')",
    "os.truncate('/plugin/plugin.py', 0)",
    "os.fork()",
    "os.execv(sys.executable, [sys.executable])",
    "subprocess.run([sys.executable])",
    "multiprocessing.get_context('fork').Process(target=print).start()",
    "sqlite3.connect('/plugin/a.db').execute('create table a (b)')",
    "socket.socket()",
    "os.kill(-1, 9)",
    "os.sched_setaffinity(0, {0})",
    "os.setuid(0)",
    "os.memfd_create('a')",
    "data.digits()",
]


def test_files_processes_sockets_and_labels_are_out_of_reach(tmp_path: Path, settings: Settings) -> None:
    code = f"""
import multiprocessing, os, socket, sqlite3, subprocess, sys
from tilewise import data
def load(event, folder):
    open("/tmp/a", "w").close()
    allowed = []
    for statement in {REACHING_OUT!r}:
        try:
            eval(statement)
            allowed.append(statement)
        except Exception:
            pass
    raise RuntimeError(f"allowed {{allowed}}")
"""
    assert "allowed []" in str(rejection(tmp_path, code, settings))


def test_memory_and_scratch_beyond_the_limit_are_refused(tmp_path: Path, settings: Settings) -> None:
    code = "import numpy as np\ndef load(event, folder):\n    return np.ones(1 << 30)\n"
    assert "MemoryError" in str(rejection(tmp_path, code, settings)).replace("_ArrayMemoryError", "MemoryError")


def test_a_plugin_with_files_has_no_shipped_weights_and_all_its_bytes_count(tmp_path: Path) -> None:
    plugin(tmp_path, HONEST)
    (tmp_path / "weights.bin").write_bytes(b"x")
    submitted = Submitted.read(tmp_path / "plugin.py")
    assert submitted.brings_weights and submitted.size == len(HONEST) + 1 + len("weights.bin")
    with pytest.raises(Rejected, match=r"mlp\.safetensors"):
        score_plugin(tmp_path / "plugin.py", "MLP_SPRINT")
    (tmp_path / "weights.bin").write_bytes(bytes(9 << 20))
    with pytest.raises(Rejected, match="may have at most"):
        Submitted.read(tmp_path / "plugin.py")


def test_a_folder_that_is_not_what_was_handed_in_is_noticed(tmp_path: Path) -> None:
    submitted = Submitted({"plugin.py": b"pass"})
    submitted.write(tmp_path)
    submitted.check_unchanged(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(Rejected, match="differs from the submitted one"):
        submitted.check_unchanged(tmp_path)


def test_without_a_sandbox_the_open_division_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "unavailable_reason", lambda: "the open division is off: no sandbox")
    with pytest.raises(UnavailableError, match="is off"):
        score_plugin(plugin(tmp_path, HONEST), "MLP_SPRINT")


def test_an_answer_faster_than_an_empty_one_is_refused(tmp_path: Path) -> None:
    event = TinyMLPerf.MLP_SPRINT
    questions = questions_for(event, np.random.default_rng(0), 4)
    too_fast = Answers({}, [1e-9] * 4)
    with pytest.raises(Rejected, match="no program on this machine"):
        _check_floor(baseline(event), questions, too_fast, 1, time.monotonic() + 60)


def test_a_baseline_slowed_down_in_its_sandbox_is_noticed() -> None:
    event = TinyMLPerf.MLP_SPRINT
    questions = questions_for(event, np.random.default_rng(0), 4)
    with pytest.raises(TooNoisy, match="in its sandbox"):
        _check_baseline(event, baseline(event), questions, 10.0)


def test_a_plugin_that_dies_or_talks_nonsense_gets_a_sentence(tmp_path: Path, settings: Settings) -> None:
    for code in ("raise SystemExit(3)", "def load(e, f):\n    return lambda x: 1 / 0", "def load(e, f): return None"):
        assert rejection(tmp_path, code, settings).code == "plugin failed"


def test_a_plugin_that_never_answers_is_ended(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(host, "_BUSY_SHARE", 1.0)
    pids: list[int] = []
    real = bubblewrap._kill_at_exit

    def noted(pid: int) -> AbstractContextManager[None]:
        pids.append(pid)
        return real(pid)

    monkeypatch.setattr(bubblewrap, "_kill_at_exit", noted)
    code = "def load(e, f):\n    def answer(x):\n        while True: pass\n    return answer"
    assert "no answer within" in str(rejection(tmp_path, code, settings))
    assert pids and all(_has_ended(pid) for pid in pids)


NEVER_READS = """
import fcntl, time
def load(event, folder):
    for descriptor in range(3, 9):
        try:
            fcntl.fcntl(descriptor, 1031, 4096)  # F_SETPIPE_SZ: a question has 8 KiB and no longer fits
        except OSError:
            pass
    return lambda x: time.sleep(1000)
"""
ONE_BYTE_AT_A_TIME = """
import os, time
def load(event, folder):
    def answer(x):
        while True:
            for descriptor in range(3, 9):
                try:
                    os.write(descriptor, b"x")
                except OSError:
                    pass
            time.sleep(0.05)
    return answer
"""


@pytest.mark.parametrize("code", [NEVER_READS, ONE_BYTE_AT_A_TIME], ids=["never reads", "one byte at a time"])
def test_a_plugin_does_not_hold_the_harness(
    code: str, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_ANSWER_SECONDS", 5.0)
    monkeypatch.setattr(host, "_BUSY_SHARE", 1.0)  # this machine may be busy
    assert "no answer within 5 s" in str(rejection(tmp_path, code, settings))


def test_a_run_ends_at_its_deadline_however_often_the_plugin_answers(tmp_path: Path, settings: Settings) -> None:
    code = HONEST.replace("def answer(x):", "import time\n    def answer(x):\n        time.sleep(0.2)")
    with pytest.raises((Rejected, TooNoisy), match=r"did not answer|used up the time of the whole run"):
        score_plugin(plugin(tmp_path, code), "MLP_SPRINT", replace(settings, run_seconds=4.0))


def test_a_late_answer_on_a_busy_machine_is_noise_and_not_a_failure(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(host, "waiting_ns", lambda pid: time.monotonic_ns() // 2)  # half of the time in the queue
    code = "import time\ndef load(e, f):\n    return lambda x: time.sleep(100)"
    with pytest.raises(TooNoisy, match="processor core"):
        score_plugin(plugin(tmp_path, code), "MLP_SPRINT", settings)


def test_the_wait_of_every_thread_counts_when_an_answer_is_late(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others_wait(process: int | str) -> int:
        pid, _, thread = str(process).partition("/task/")
        return time.monotonic_ns() // 2 if thread not in ("", pid) else 0

    monkeypatch.setattr(host, "waiting_ns", others_wait)
    code = (
        "import threading, time\ndef load(e, f):\n    def answer(x):\n"
        "        worker = threading.Thread(target=time.sleep, args=(100,))\n"
        "        worker.start()\n        worker.join()\n    return answer"
    )
    with pytest.raises(TooNoisy, match="processor core"):
        score_plugin(plugin(tmp_path, code), "MLP_SPRINT", replace(settings, run_seconds=10.0))


class ScriptedHost:
    """A host whose plugin answers in a millisecond and works for another before the next question."""

    idle = 9.9  # of loading

    def ask(self, question: np.ndarray, watched: bool = False) -> tuple[np.ndarray, float]:
        self.idle += 1e-3
        return question, 1e-3


def test_work_between_questions_counts_as_time_of_the_answers() -> None:
    questions = questions_for(TinyMLPerf.MLP_SPRINT, np.random.default_rng(0), 8)
    hosts: list[Any] = [ScriptedHost(), ScriptedHost()]
    answers = _ask_interleaved(hosts[0], hosts[1], questions, np.random.default_rng(0))
    timed_count = sum(question.is_timed and question.repeats is None for question in questions)
    repeats = sum(question.repeats is not None for question in questions)
    for side in answers:
        assert len(side.seconds) == timed_count
        # Work after repeated questions is not lost: it counts on the others.
        assert side.idle_seconds == pytest.approx(1e-3 * len(questions) / (len(questions) - repeats))
        assert side.seconds == pytest.approx([1e-3 + side.idle_seconds] * timed_count)


def test_a_plugin_that_creates_a_file_is_charged_the_whole_scratch_folder(tmp_path: Path, settings: Settings) -> None:
    """Files that exist only during a question would be in no sample of the folder."""
    event, deadline = TinyMLPerf.MLP_SPRINT, time.monotonic() + 600
    inputs = event.timed_inputs(np.random.default_rng(0), 1)[0]
    brief = HONEST.replace(
        "    def answer(x):",
        "    import os\n    def answer(x):\n        open('/tmp/a', 'w').close(); os.unlink('/tmp/a')",
    )
    least = 1 << 40
    for code, scratch in ((HONEST, 0), (brief, bubblewrap.SCRATCH_BYTES + host._MOST_NAMES * host._NAME_BYTES)):
        with host.hosted("plugin", Submitted({"plugin.py": code.encode()}), event, 1, deadline) as plugin_host:
            plugin_host.ask(inputs)
            assert plugin_host.memory_bytes(least) == least + scratch


# What ends, and what the first thread and the one that answers do at last; the call is `exit` of one thread.
ENDS = {
    "process": ("time.sleep(1000)", "os._exit(0)"),
    "first thread": ("ctypes.CDLL(None).syscall(60, 0)", "time.sleep(1000)"),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_plugin_that_ends_before_its_memory_is_measured_is_rejected(what: str) -> None:
    event, deadline = TinyMLPerf.MLP_SPRINT, time.monotonic() + 600
    first, answering = ENDS[what]
    code = f"""
import ctypes, os, threading, time
def load(event, folder):
    def answers():
        os.read(3, 8192)
        os.write(4, bytes(1280))
        {answering}
    os.write(4, b"l")
    threading.Thread(target=answers).start()
    {first}
"""
    with host.hosted("plugin", Submitted({"plugin.py": code.encode()}), event, 1, deadline) as plugin_host:
        plugin_host.ask(event.timed_inputs(np.random.default_rng(0), 1)[0])
        until(lambda: not host._status_bytes(plugin_host.pid, "status", "VmHWM"))
        with pytest.raises(Rejected, match="ended before its memory"):
            plugin_host.memory_bytes(0)


def test_a_practice_score_has_an_interval_and_is_never_ranked(tmp_path: Path, settings: Settings) -> None:
    noisy = replace(settings, widest_interval=0.0)
    with pytest.raises(TooNoisy):
        score_plugin(plugin(tmp_path, HONEST), "MLP_SPRINT", noisy)
    score = scored(tmp_path, HONEST, replace(noisy, practice=True))
    assert score.interval[0] < score.score < score.interval[1]
    recipe = reference_recipe("MLP_SPRINT")
    with pytest.raises(Rejected, match="not ranked"):
        check_consistent(score.as_dict())
    with pytest.raises(Rejected, match="not ranked"):
        LocalLeaderboard(tmp_path / "board.jsonl").add("owls", recipe, score)
    with open_board(tmp_path / "b.sqlite") as board, pytest.raises(Rejected, match="not ranked"):
        board.add_scored("owls", recipe, score)


def test_a_plugin_does_not_outlive_a_killed_harness(tmp_path: Path) -> None:
    """The supervisor ends the sandbox when the harness is gone, even if it was killed with SIGKILL."""
    sleeps = "threading.Thread(target=time.sleep, args=(1e6,)).start()"
    path = plugin(
        tmp_path,
        f"import threading, time\ndef load(e, f):\n    for _ in range(20): {sleeps}\n    threading.Event().wait()",
    )
    patient = "from tilewise_arena.sandbox import host, score_plugin; host._ANSWER_SECONDS = 600.0"
    code = f"{patient}; score_plugin({str(path)!r}, 'MLP_SPRINT')"
    harness = subprocess.Popen([sys.executable, "-c", code])
    mine = until(lambda: {p for p in _descendants(harness.pid) if _threads(p) > 20}, "loading", 3 * PATIENCE)
    os.kill(harness.pid, signal.SIGKILL)
    harness.wait()
    until(lambda: all(_has_ended(pid) for pid in mine))


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from (int(child), *_descendants(int(child)))


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").glob("*")))


def _has_ended(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_what_is_written_while_no_question_is_open_gets_a_sentence(tmp_path: Path, settings: Settings) -> None:
    code = """
import os
def load(event, folder):
    for descriptor in range(3, 9):
        try:
            os.write(descriptor, b"x" * 64)
        except OSError:
            pass
    return lambda x: x
"""
    assert rejection(tmp_path, code, settings).code == "plugin failed"
