"""The plugin's process: limits first, then the plugin, then one answer per question until the pipe closes.

Run as ``python -m tilewise.bench.plugin_host PLUGIN EVENT``; see `plugins`, which starts it and trusts nothing it says.
What is refused here (files elsewhere, processes, sockets) is refused by Python's audit hook; the network is also taken
away by the kernel where it allows that. It keeps honest plugins honest. What makes a figure trustworthy is that the
other process holds the clock, the inputs and the reference.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from tilewise.bench import baseline_plugin, wire
from tilewise.bench.events import TinyMLPerf

MEMORY_BYTES = 4 << 30
CPU_SECONDS = 600
FILE_BYTES = 64 << 20
OPEN_FILES = 128

_REFUSED = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "socket.",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "os.kill",
    "os.putenv",
    "shutil.rmtree",
    "ftplib.",
    "smtplib.",
    "urllib.Request",
)


def limit_resources() -> None:
    """Time, memory, size of files and number of open ones: set for this process, and not to be raised again."""
    limits = {
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (value, value))


def guard(folder: Path, hide_shipped_weights: bool) -> None:
    """From here on: no processes, no sockets, files read only from Python, tilewise and `folder`, written only here."""
    scratch = Path.cwd().resolve()
    package = Path(tilewise.__file__).resolve().parent
    readable = {folder, scratch, package, *(Path(p).resolve() for p in sysconfig.get_paths().values())}
    readable |= {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    readable |= {Path(p).resolve() for p in sys.path if p}
    hidden = package / "models" / "weights"

    def hook(name: str, args: tuple[Any, ...]) -> None:
        if name.startswith(_REFUSED):
            raise PermissionError(f"a plugin may not use {name}")
        if name != "open" or not isinstance(args[0], str | bytes | os.PathLike):
            return
        path = Path(os.fsdecode(args[0])).resolve()
        writes = isinstance(args[1], str) and any(letter in args[1] for letter in "wax+")
        writes = writes or bool(isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        allowed = {scratch} if writes else readable
        if hide_shipped_weights and path.is_relative_to(hidden):
            raise PermissionError("this plugin brings its own weights, so the shipped ones are out of its reach")
        if not any(path.is_relative_to(root) for root in allowed) and path != Path(os.devnull):
            raise PermissionError(f"a plugin may not {'write' if writes else 'read'} {path}")

    sys.addaudithook(hook)


def load_plugin(path: Path, event: str) -> Callable[[Any], Any]:
    """The plugin's `load(event, folder)`, called: a function from inputs to answers."""
    if str(path) == "baseline":
        return baseline_plugin.load(event, path)
    spec = importlib.util.spec_from_file_location("plugin", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer: Callable[[Any], Any] = module.load(event, path.parent)
    return answer


def main() -> None:
    plugin, event, threads = sys.argv[1:4]
    tilewise.set_num_threads(int(threads))
    questions, answers = os.dup(0), os.dup(1)
    with Path(os.devnull).open("r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)  # what the plugin prints is not an answer
    TinyMLPerf.event(event)
    path = Path(plugin) if plugin == "baseline" else Path(plugin).resolve()
    limit_resources()
    wire.send(answers, wire.encode(np.zeros(0)))  # the plugin's memory is counted from here on
    wire.receive(questions)
    if plugin != "baseline":
        guard(path.parent, any(f.is_file() and f.suffix != ".py" for f in path.parent.iterdir()))
    answer = load_plugin(path, event)
    wire.send(answers, wire.encode(np.zeros(1)))  # ready
    with contextlib.suppress(wire.Ended):
        while True:
            question = wire.decode(wire.receive(questions))
            wire.send(answers, wire.encode(np.asarray(answer(question))))


if __name__ == "__main__":
    main()
