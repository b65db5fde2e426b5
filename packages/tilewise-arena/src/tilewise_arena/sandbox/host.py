"""The harness's side of a plugin in its sandbox: its files, the pipe to it, and measurements of its resources.

CPU time that the plugin uses while no question is open is counted apart from its time on questions. Its memory is the
larger of the growth of its resident set and the pages that it changed or added since a reference process was forked
(see `process.fork_memory_reference`), plus the whole scratch folder if it ever created a file there. Pages of files
that it maps are added pages too. All of it comes from the kernel; nothing that the process reports about itself is
trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import random
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import read_input
from tilewise.bench.events import Event
from tilewise.bench.integrity import waiting_ns
from tilewise.bench.recipe import MOST_FILE_BYTES
from tilewise.errors import Rejected, TooNoisy, UnavailableError
from tilewise_arena.sandbox import bubblewrap, wire

Array = npt.NDArray[Any]
_ANSWER_SECONDS = 60.0  # for loading, and for each answer; arbitrary, the slowest baseline takes about four seconds
_BUSY_SHARE = 0.1  # share of an answer's time spent waiting for a CPU core from which on the machine is at fault
# A mapping in /proc/PID/smaps: addresses, rights, offset, device and inode of the file, its name, and sizes in KiB.
_MAPPING = re.compile(
    r"^[\da-f]+-[\da-f]+ \S+ \S+ (?P<file>\S+ \d+).*\n(?:.*\n)*?Rss: +(?P<resident>\d+)"
    r"(?:.*\n)*?Private_Dirty: +(?P<dirty>\d+)",
    re.MULTILINE,
)
# Files in the scratch folder, mappings of a process (both arbitrary, the latter ten times an honest plugin's), and
# kernel memory per file (estimated).
_MOST_NAMES, _MOST_MAPPINGS, _NAME_BYTES = 256, 4096, 1024


@dataclass
class Host:
    """A plugin in its sandbox as the harness sees it: the pipe to it, and its resource usage so far."""

    child: bubblewrap.SandboxedProcess
    event: Event
    role: str  # "plugin", "baseline" or "empty"
    trusted: bool  # one of our own programs
    deadline: float  # of the whole run, on the monotonic clock
    pid: int = 0  # of the plugin, seen from outside
    rss_before: int = 0
    idle: float = 0.0  # CPU seconds while none was open
    own: int = 0  # peak bytes of private memory
    files: int = 0  # peak bytes of clean pages of files that the plugin mapped
    quickest: float = math.inf  # seconds of the fastest answer, without waiting for a CPU core
    _cpu: float = 0.0
    _empty_scratch: int = 0  # time of the last change of the scratch folder before the plugin was loaded
    _files_before: set[str] = field(default_factory=set)  # mapped before the plugin was loaded

    def ask(self, question: Array, watched: bool = False) -> tuple[Array, float]:
        """Send a question (input array) to the plugin; return its answer and the seconds it took.

        If `watched`, the memory of the plugin is sampled, which takes time; use this for questions that are not timed.
        """
        message = np.ascontiguousarray(question, wire.question_of(self.event)[1])
        layout = wire.answer_of(self.event)
        length = math.prod(layout[0]) * np.dtype(layout[1]).itemsize
        asking, answering = self._pipes()
        if select.select([answering], [], [], 0)[0]:
            action = "wrote" if _bytes_waiting(answering) else "ended"
            raise Rejected(
                "plugin failed", f"the plugin {action} while no question was being asked{self.last_error_line()}"
            )
        waited, all_waited = waiting_ns(self.pid), self._all_waiting_ns(self.pid)
        self.idle += self._cpu_time() - self._cpu
        start, deadline = time.perf_counter(), self._deadline(_ANSWER_SECONDS)
        try:
            wire.send(asking, message, deadline)
            if watched:
                self._watch(deadline)
            content = wire.receive(answering, length, deadline)
        except wire.Ended as error:
            waited_seconds = 1e-9 * (self._all_waiting_ns(self.pid) - all_waited)
            raise self._failure(error, time.perf_counter() - start, waited_seconds, deadline) from None
        seconds = time.perf_counter() - start
        self._cpu = self._cpu_time()
        self.quickest = min(self.quickest, seconds - 1e-9 * (waiting_ns(self.pid) - waited))
        if watched:
            self._sample_memory()
            self._sample_files()
        return wire.decode(content, layout), seconds

    def load(self) -> None:
        """Send the seccomp filter to the plugin's process, and wait until it has loaded the plugin."""
        asking, answering = self._pipes()
        program = bubblewrap.seccomp_filter()
        start, deadline = time.perf_counter(), self._deadline(_ANSWER_SECONDS)
        try:
            wire.receive(answering, 1, deadline)
            self.pid = self.child.program_pid()
            self.rss_before = _status_bytes(self.pid, "status", "VmRSS")
            self._empty_scratch = self._scratch().stat().st_ctime_ns
            self._files_before = set(_clean_pages_by_file(self.pid))
            wire.send(asking, struct.pack("<I", len(program)) + program, deadline)
            self._watch(deadline)
            wire.receive(answering, 1, deadline)
        except wire.Ended as error:
            waited = 1e-9 * self._all_waiting_ns(self.pid or self.child.pid)
            raise self._failure(error, time.perf_counter() - start, waited, deadline) from None
        self._cpu = self._cpu_time()

    @staticmethod
    def _all_waiting_ns(pid: int) -> int:
        """Return the ns that all threads of a process have waited for a core."""
        return sum(waiting_ns(f"{pid}/task/{path.name}") for path in Path(f"/proc/{pid}/task").glob("*"))

    def _deadline(self, seconds: float) -> float:
        """Return the monotonic time `seconds` from now, or the end of the whole run if that is earlier."""
        return min(time.monotonic() + seconds, self.deadline)

    def _failure(self, error: wire.Ended, seconds: float, waited: float, deadline: float) -> Rejected | TooNoisy:
        """Return the exception for an answer that did not arrive; `waited` are seconds spent waiting for a core.

        A late answer is the plugin's fault only if the plugin had the machine to itself. If this process itself came
        late to the deadline, the machine was busy or suspended. Our own programs are trusted.
        """
        if isinstance(error, wire.Late):
            waited += max(time.monotonic() - deadline, 0.0)
            if self.trusted or waited > _BUSY_SHARE * seconds:
                return TooNoisy(
                    f"not scored: the {self.role} did not answer within {seconds:.0f} s and waited {waited:.0f} s of "
                    "them for a processor core; measure again when this machine is idle"
                )
            whole = " and used up the time of the whole run" if time.monotonic() >= self.deadline else ""
            return Rejected("plugin failed", f"the plugin gave no answer within {seconds:.0f} s{whole}")
        return Rejected("plugin failed", f"the {self.role} gave no answer: {error}{self.last_error_line()}")

    def _pipes(self) -> tuple[int, int]:
        """Return the file descriptors of the child's standard input and output."""
        process = self.child.process
        assert process.stdin is not None and process.stdout is not None
        return process.stdin.fileno(), process.stdout.fileno()

    def last_error_line(self) -> str:
        """Return the last line of standard error in parentheses, if the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.process.wait(1.0)
            line = self.child.last_error_line()
            return f" ({line})" if line else ""
        return ""

    def memory_bytes(self, least: int) -> int:
        """Return the plugin's peak memory in bytes, including its scratch folder; at least `least`.

        Memory that it used between two samples shows in the peak of the resident set. The kernel keeps no such peak of
        the scratch folder, so all of it counts once a file was created. `least` is what any program needs: its weights,
        a question and an answer.
        """
        resident, peak = (_status_bytes(self.pid, "status", name) for name in ("VmRSS", "VmHWM"))
        between_samples = _status_bytes(self.pid, "smaps_rollup", "Private_Dirty") + peak - resident
        if not peak:
            raise Rejected("plugin failed", f"the {self.role} ended before its memory was measured")
        unused = self._scratch().stat().st_ctime_ns == self._empty_scratch
        scratch = 0 if unused else bubblewrap.SCRATCH_BYTES + _MOST_NAMES * _NAME_BYTES
        return max(peak - self.rss_before, max(self.own, between_samples) + self.files, least) + scratch

    def _watch(self, deadline: float) -> None:
        """Sample the plugin's memory until it answers; raise Late at `deadline` (monotonic seconds).

        The pauses are random, so that no moment of an answer is sure to be unseen.
        """
        while not select.select([self._pipes()[1]], [], [], random.uniform(0, 5e-4))[0]:
            self._sample_memory()
            if time.monotonic() > deadline:
                raise wire.Late("it did not answer in time")

    def _sample_memory(self) -> None:
        """Update the peak of the plugin's memory; reject a plugin that has too many files."""
        self.own = max(self.own, _status_bytes(self.pid, "smaps_rollup", "Private_Dirty"))
        with contextlib.suppress(OSError):
            usage = os.statvfs(self._scratch())
            if usage.f_files - usage.f_ffree > _MOST_NAMES:
                raise Rejected(
                    "plugin failed", f"the plugin created more than the {_MOST_NAMES:,} files and folders allowed"
                )

    def _sample_files(self) -> None:
        """Update the peak of the clean pages of files mapped since loading; reject a plugin with too many mappings.

        Unmapping a library does not make up for them, as it would in the growth of the resident set.
        """
        pages = _clean_pages_by_file(self.pid)
        self.files = max(self.files, sum(size for file, size in pages.items() if file not in self._files_before))

    def _scratch(self) -> Path:
        """Return the path, outside of the sandbox, of the plugin's scratch folder."""
        return Path(f"/proc/{self.pid}/root{bubblewrap.SCRATCH}")

    def _cpu_time(self) -> float:
        """Return the CPU time in seconds that the plugin has used so far."""
        try:
            # Linux encodes the CPU clock of a process (all its threads) in the clock id like this.
            return time.clock_gettime_ns((~self.pid << 3) | 2) * 1e-9
        except OSError:
            return self._cpu


def _bytes_waiting(descriptor: int) -> int:
    count = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)


def _status_bytes(pid: int, file: str, name: str) -> int:
    """Read the size called `name` from a file of /proc/`pid`, in bytes; 0 if it is missing."""
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _clean_pages_by_file(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process that are not private and dirty, by mapped file (device and inode)."""
    pages: dict[str, int] = {}
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/maps").read_bytes().count(b"\n") > _MOST_MAPPINGS:
            raise Rejected("plugin failed", f"the plugin has more than the {_MOST_MAPPINGS:,} memory mappings allowed")
        for mapping in _MAPPING.finditer(Path(f"/proc/{pid}/smaps").read_text(errors="replace")):
            clean_bytes = 1024 * (int(mapping["resident"]) - int(mapping["dirty"]))
            pages[mapping["file"]] = pages.get(mapping["file"], 0) + clean_bytes
    return pages


@dataclass(frozen=True)
class Submitted:
    """The files of a submitted plugin, by name."""

    files: dict[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Submitted:
        """Read the plugin at `path`, which becomes plugin.py, and the other files in its folder that are not Python."""
        if not path.is_file():
            raise UnavailableError(f"there is no plugin at {path}")
        beside = [f for f in sorted(path.parent.iterdir()) if f.is_file() and not f.is_symlink() and f != path]
        beside = [f for f in beside if f.suffix != ".py"]
        if sum(f.stat().st_size for f in (path, *beside)) > MOST_FILE_BYTES:
            raise Rejected("too large", f"a plugin and its files may have at most {MOST_FILE_BYTES:,} bytes")
        content = {f.name: read_input(f, MOST_FILE_BYTES) for f in beside}
        return cls({"plugin.py": read_input(path, MOST_FILE_BYTES)} | content)

    @property
    def brings_weights(self) -> bool:
        return len(self.files) > 1

    @property
    def size(self) -> int:
        """Bytes of all files and their names, either of which could contain weights."""
        beside = sum(len(name.encode()) for name in self.files if name != "plugin.py")
        return beside + sum(len(content) for content in self.files.values())

    def write(self, folder: Path) -> None:
        """Write the files to a folder that the sandbox can read."""
        folder.chmod(0o755)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o644)

    def check_unchanged(self, folder: Path) -> None:
        """Reject the plugin if the files in `folder` differ from those submitted."""
        hashes = {f.name: hashlib.sha256(f.read_bytes()).digest() for f in folder.iterdir()}
        if hashes != {name: hashlib.sha256(content).digest() for name, content in self.files.items()}:
            raise Rejected("changed files", "the plugin's folder differs from the submitted one")


@contextmanager
def hosted(role: str, submitted: Submitted, event: Event, threads: int, deadline: float) -> Iterator[Host]:
    """Run a plugin (or, by `role`, the baseline or an empty plugin) in a sandbox inside the block.

    `deadline` is the end of the whole run on the monotonic clock.
    """
    bubblewrap.require_sandbox()
    module, arguments = "tilewise_arena.sandbox.process", (role, event.name, str(bubblewrap.fresh_user()))
    trusted = role != "plugin"
    hide_weights = not trusted and submitted.brings_weights
    seconds = max(deadline - time.monotonic(), 0.0)
    with tempfile.TemporaryDirectory(prefix="tilewise-plugin-") as folder:
        files = Submitted({}) if trusted else submitted
        files.write(Path(folder))
        with bubblewrap.start_process(Path(folder), module, arguments, threads, hide_weights, seconds) as child:
            host = Host(child, event, role, trusted, deadline)
            host.load()
            yield host
        files.check_unchanged(Path(folder))
