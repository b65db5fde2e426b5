"""A plugin in its jail, seen from outside: what was handed in, the pipe to it, and what it takes of the machine.

Processor time that the plugin spends while no question is open is counted apart from that on questions; memory is the
kernel's own count of the process, its scratch folder included: the larger of what it grew by and what it has changed or
added since a twin of it was left behind (see process.leave_a_twin). Nothing that the process says of itself is
believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import read_input
from tilewise.bench.errors import Rejected
from tilewise.bench.events import Event
from tilewise.bench.integrity import waiting_ns
from tilewise.bench.recipe import MOST_FILE_BYTES
from tilewise.errors import UnavailableError
from tilewise_arena.sandbox import jail, wire

Array = npt.NDArray[Any]
_LOAD_SECONDS = 60.0
_ANSWER_SECONDS = 60.0
_MOST_NAMES, _NAME_BYTES = 4096, 1024
_IDLE_SECONDS, _IDLE_SHARE = 0.005, 0.01  # processor time allowed between questions; an honest plugin needs 3 µs each


@dataclass
class Host:
    """A plugin in its jail and the harness's end of its pipe."""

    prisoner: jail.Prisoner
    event: Event
    rss_before: int = 0
    busy: float = 0.0  # processor seconds while a question was open
    idle: float = 0.0  # and while none was
    scratch: int = 0  # the most it kept in its scratch folder
    own: int = 0  # the most it had in memory for itself
    quickest: float = math.inf  # the shortest answer, without what it waited for a core
    _cpu: float = 0.0

    def ask(self, question: Array, watched: bool = False) -> tuple[Array, float]:
        """The answer, and how long it took by this process's clock.

        While a question is `watched` its memory is looked at, which takes time: this is for those that are not timed.
        """
        message = np.ascontiguousarray(question, wire.question_of(self.event)[1])
        layout = wire.answer_of(self.event)
        length = math.prod(layout[0]) * np.dtype(layout[1]).itemsize
        asking, answering = self._pipes()
        if select.select([answering], [], [], 0)[0]:
            what = "wrote" if _bytes_waiting(answering) else "ended"
            raise Rejected("plugin failed", f"the plugin {what} while no question was open{self.last_words()}")
        waited = waiting_ns(self.prisoner.pid)
        before = self._cpu_time()
        self.idle += before - self._cpu
        start = time.perf_counter()
        try:
            wire.send(asking, message)
            if watched:
                self._watch(_ANSWER_SECONDS)
            content = wire.receive(answering, length, _ANSWER_SECONDS)
        except wire.Ended as error:
            raise Rejected("plugin failed", f"the plugin gave no answer: {error}{self.last_words()}") from None
        seconds = time.perf_counter() - start
        self._cpu = self._cpu_time()
        self.busy += self._cpu - before
        self.quickest = min(self.quickest, seconds - 1e-9 * (waiting_ns(self.prisoner.pid) - waited))
        if watched:
            self._look_at_memory()
        return wire.decode(content, layout), seconds

    def load(self) -> None:
        """Let the plugin load, within its time."""
        asking, answering = self._pipes()
        rules = jail.allowed_calls()
        try:
            wire.receive(answering, 1, _LOAD_SECONDS)
            self.rss_before = _status_bytes(self.prisoner.pid, "status", "VmRSS")
            wire.send(asking, struct.pack("<I", len(rules)) + rules)
            self._watch(_LOAD_SECONDS)
            wire.receive(answering, 1, 0.0)
        except wire.Ended as error:
            raise Rejected("plugin failed", f"the plugin did not load: {error}{self.last_words()}") from None
        self._cpu = self._cpu_time()

    def _pipes(self) -> tuple[int, int]:
        process = self.prisoner.process
        assert process.stdin is not None and process.stdout is not None
        return process.stdin.fileno(), process.stdout.fileno()

    def last_words(self) -> str:
        """The last line the process wrote about its end, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.prisoner.process.wait(1.0)
            shown = self.prisoner.last_words()
            return f" ({shown})" if shown else ""
        return ""

    def memory_bytes(self, least: int) -> int:
        """The most it held for the plugin, its files in memory included.

        `least` is what any program must hold: its weights, a question and an answer.
        """
        grown = _status_bytes(self.prisoner.pid, "status", "VmHWM") - self.rss_before
        return max(grown, self.own, least) + self.scratch

    def _watch(self, seconds: float) -> None:
        """Look at its memory until it says something, or for so long."""
        until = time.monotonic() + seconds
        while not select.select([self._pipes()[1]], [], [], 5e-4)[0]:
            self._look_at_memory()
            if time.monotonic() > until:
                raise wire.Ended(f"it gave no answer within {seconds:g} s")

    def _look_at_memory(self) -> None:
        """What the plugin has changed or added, and what lies in its scratch folder, at this moment."""
        self.own = max(self.own, _status_bytes(self.prisoner.pid, "smaps_rollup", "Private_Dirty"))
        self.scratch = max(self.scratch, self._scratch_bytes())

    def check_idle(self) -> None:
        """Work outside of the timed calls shows as processor time between them."""
        if self.idle > _IDLE_SECONDS + _IDLE_SHARE * self.busy:
            raise Rejected(
                "work outside timing",
                f"the plugin used {self.idle:.2f} s of processor time while no question was open, and {self.busy:.2f} "
                "s on the questions: work before or after timing does not count as fast",
            )

    def _cpu_time(self) -> float:
        try:
            return (
                time.clock_gettime_ns((~self.prisoner.pid << 3) | 2) * 1e-9
            )  # Linux: the clock of that process, all threads
        except OSError:
            return self._cpu

    def _scratch_bytes(self) -> int:
        """What lies in the scratch folder, files without a name included; names take the kernel's memory too."""
        try:
            found = os.statvfs(f"/proc/{self.prisoner.pid}/root{jail.SCRATCH}")
        except OSError:
            return 0
        names = found.f_files - found.f_ffree
        if names > _MOST_NAMES:
            raise Rejected("plugin failed", f"the plugin made more than the {_MOST_NAMES:,} files and folders it may")
        return (found.f_blocks - found.f_bfree) * found.f_frsize + max(names - 1, 0) * _NAME_BYTES


def _bytes_waiting(descriptor: int) -> int:
    count = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)


def _status_bytes(pid: int, file: str, name: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


@dataclass(frozen=True)
class Submitted:
    """What a plugin consists of: files by name, as they were handed in."""

    files: dict[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Submitted:
        """The plugin at `path` and the files beside it; what is called otherwise becomes plugin.py."""
        if not path.is_file():
            raise UnavailableError(f"there is no plugin at {path}")
        beside = [f for f in sorted(path.parent.iterdir()) if f.is_file() and not f.is_symlink() and f != path]
        beside = [f for f in beside if f.suffix != ".py"]
        if sum(f.stat().st_size for f in (path, *beside)) > MOST_FILE_BYTES:
            raise Rejected("too large", f"a plugin and its files have {MOST_FILE_BYTES:,} bytes at most")
        content = {f.name: read_input(f, MOST_FILE_BYTES) for f in beside}
        return cls({"plugin.py": read_input(path, MOST_FILE_BYTES)} | content)

    @property
    def brings_weights(self) -> bool:
        return len(self.files) > 1

    @property
    def size(self) -> int:
        """Bytes of everything handed in: weights in the program's text are weights too, and so are those in names."""
        beside = sum(len(name.encode()) for name in self.files if name != "plugin.py")
        return beside + sum(len(content) for content in self.files.values())

    def write(self, folder: Path) -> None:
        folder.chmod(0o755)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o644)

    def check_unchanged(self, folder: Path) -> None:
        """The folder holds what was handed in, byte for byte."""
        found = {f.name: hashlib.sha256(f.read_bytes()).digest() for f in folder.iterdir()}
        if found != {name: hashlib.sha256(content).digest() for name, content in self.files.items()}:
            raise Rejected("changed files", "the plugin's folder is not what was handed in")


@contextmanager
def hosted(role: str, submitted: Submitted, event: Event, threads: int = 1) -> Iterator[Host]:
    """A plugin (or the baseline, or an empty answer) in a jail of its own, ended with the block."""
    jail.check()
    words = ("-m", "tilewise_arena.sandbox.process", role, event.name, str(jail.fresh_user()))
    hides = role == "plugin" and submitted.brings_weights
    with tempfile.TemporaryDirectory(prefix="tilewise-plugin-") as folder:
        shown = submitted if role == "plugin" else Submitted({})
        shown.write(Path(folder))
        with jail.started(Path(folder), words, threads, hides) as prisoner:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(prisoner.pid, jail.cores_for(threads))
            host = Host(prisoner, event)
            host.load()
            yield host
        shown.check_unchanged(Path(folder))
