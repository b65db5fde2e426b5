"""The jail of the open division: what a plugin's process is given, and nothing else of this machine.

bubblewrap starts it in mount, process, network, IPC and host name namespaces of its own (and in a user namespace where
the caller is not root; root's plugins get a user of their own, without capabilities). It sees the interpreter, NumPy
and tilewise read-only, its own folder read-only, and a small scratch folder in memory. Once Python is loaded the
process takes a list of system calls, made here with libseccomp, and every other call fails from then on: no other
programs, no processes, no sockets, no signals, no change of cores. Where the system gives no such jail the open
division is off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

import tilewise
from tilewise._extension import native
from tilewise.errors import UnavailableError

SITE, PLUGIN, SCRATCH = "/site", "/plugin", "/tmp"
SCRATCH_BYTES = 16 << 20
_SECONDS_TO_END = 5.0
_CLONE_THREAD = 0x10000
_MAP_HUGETLB = 0x40000  # pages that the kernel counts apart
_KEEP_PAGES = (3, 14, 15)  # madvise: will need, huge pages or not; what would hide memory from its count is refused

_CALLS = """
read write readv writev pread64 pwrite64 open openat close close_range stat fstat lstat newfstatat statx
lseek mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack ioctl access faccessat
faccessat2 select pselect6 poll ppoll sched_yield nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time
times getrusage getpid gettid getppid getuid geteuid getgid getegid getgroups getcwd uname sysinfo sched_getaffinity
getcpu getrlimit fcntl dup dup2 dup3 getdents64 readlink readlinkat futex set_robust_list get_robust_list
rseq set_tid_address arch_prctl getrandom membarrier exit exit_group ftruncate fsync fdatasync flock unlink unlinkat
mkdir mkdirat rmdir umask statfs fstatfs fadvise64 mincore restart_syscall
"""  # files, memory, time, threads and what they wait on; nothing that reaches another process or changes this one


@lru_cache(maxsize=1)
def why_not() -> str:
    """Why this system gives no jail; empty where it does."""
    if not sys.platform.startswith("linux"):
        return "the open division needs Linux"
    if shutil.which("bwrap") is None:
        return "the open division needs bubblewrap: apt-get install bubblewrap"
    try:
        allowed_calls()
    except (ImportError, OSError, RuntimeError, ValueError):
        return "the open division needs libseccomp and its binding: pip install tilewise-arena"
    with tempfile.TemporaryDirectory(prefix="tilewise-jail-") as folder:
        words = ("-c", "import numpy, tilewise, os; os.listdir('/plugin')")
        done = subprocess.run(
            command(Path(folder), words, hide_weights=True, info=None), capture_output=True, env=environment(1)
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing was said"]
        return f"the open division is off: this system gives no jail for plugins ({said[0][:200]})"
    return ""


def check() -> None:
    """Say in a sentence that there is no jail here."""
    reason = why_not()
    if reason:
        raise UnavailableError(reason)


@lru_cache(maxsize=1)
def allowed_calls() -> bytes:
    """The list of system calls, compiled for this machine's kernel."""
    import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(seccomp.ERRNO(1))
    for name in _CALLS.split():
        with contextlib.suppress(ValueError, RuntimeError, OSError):  # a name that this architecture does not have
            rules.add_rule(seccomp.ALLOW, name)
    rules.add_rule(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD))
    rules.add_rule(seccomp.ERRNO(38), "clone3")  # "not known here": the C library then takes clone
    rules.add_rule(seccomp.ALLOW, "prlimit64", seccomp.Arg(2, seccomp.EQ, 0))  # to read a limit, not to set one
    rules.add_rule(seccomp.ALLOW, "mmap", seccomp.Arg(3, seccomp.MASKED_EQ, _MAP_HUGETLB, 0))
    rules.add_rule(seccomp.ALLOW, "mremap", seccomp.Arg(1, seccomp.GT, 0))  # of nothing: the same pages a second time
    for advice in _KEEP_PAGES:
        rules.add_rule(seccomp.ALLOW, "madvise", seccomp.Arg(2, seccomp.EQ, advice))
    with tempfile.TemporaryFile() as stream:
        rules.export_bpf(stream)
        stream.seek(0)
        return stream.read()


def command(folder: Path, words: tuple[str, ...], hide_weights: bool, info: int | None) -> list[str]:
    """The command line that runs Python on `words` in a jail with `folder` as the plugin's."""
    bound = [*_interpreter(), *_packages(hide_weights), "--ro-bind", str(folder), PLUGIN]
    bound = [*_parents(bound), *bound]
    places = ["--tmpfs", "/dev", *_devices(), "--size", str(SCRATCH_BYTES), "--perms", "1777", "--tmpfs", SCRATCH]
    sealed = [word for place in ("/dev", "/") for word in ("--remount-ro", place)]
    spaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:  # the host process becomes a user of its own by itself, see process.become_nobody
        spaces += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        spaces += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    told = [] if info is None else ["--info-fd", str(info)]
    ends = ["--die-with-parent", "--new-session", "--as-pid-1", "--chdir", SCRATCH]
    python = str(Path(sys.executable).resolve())
    return [str(shutil.which("bwrap")), *spaces, *bound, *places, *sealed, *ends, *told, python, "-S", "-P", *words]


def _devices() -> Iterator[str]:
    """Those that hold nothing: a terminal or a device of zeros would be a place to keep things uncounted."""
    for name in ("/dev/null", "/dev/urandom"):
        yield from ("--dev-bind", name, name)


def environment(threads: int) -> dict[str, str]:
    """All that a plugin finds in its environment."""
    counts = {name: str(threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    found = {"PYTHONPATH": SITE, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "HOME": SCRATCH}
    return counts | found | {"TMPDIR": SCRATCH, "LANG": "C.UTF-8", "TILEWISE_CACHE": f"{SCRATCH}/cache"}


def fresh_user() -> int:
    """A user that nobody else is."""
    return 200_000 + secrets.randbelow(1_000_000)


def _parents(bound: list[str]) -> Iterator[str]:
    """The folders that bound files lie in, made first and open to everybody: bubblewrap would make them root's own."""
    places = {above for word in bound if word.startswith("/") for above in Path(word).parents}
    for place in sorted(places - {Path("/")}):
        yield from ("--perms", "0755", "--dir", str(place))


def _interpreter() -> Iterator[str]:
    """The interpreter, its own modules without those that were installed, and the system's libraries."""
    python = Path(sys.executable).resolve()
    own = {python, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))}
    own |= {path for path in Path(sys.base_prefix, "lib").glob("libpython*") if path.is_file()}
    for path in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        if Path(path).is_symlink():
            yield from ("--symlink", str(Path(path).readlink()), path)
        elif Path(path).is_dir():
            yield from ("--ro-bind", path, path)
    for needed in sorted(own):
        if needed.exists():
            yield from ("--ro-bind", str(needed), str(needed))
    for root in sorted(own | {Path("/usr/lib/python3")}):
        for name in ("site-packages", "dist-packages"):
            if (root / name).is_dir():
                yield from ("--tmpfs", str(root / name))
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")


def _packages(hide_weights: bool) -> Iterator[str]:
    """NumPy, safetensors and tilewise, without data sets and, for plugins that bring their own, without weights."""
    for name in ("numpy", "safetensors", "tilewise_arena"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise UnavailableError(f"the sandbox needs {name}: pip install {name}")
        folder = Path(spec.origin).resolve().parent
        for path in (folder, folder.with_name(f"{name}.libs")):
            if path.is_dir():
                yield from ("--ro-bind", str(path), f"{SITE}/{path.name}")
    package = Path(tilewise.__file__).resolve().parent
    for child in sorted(package.iterdir()):
        if child.name != "__pycache__":
            yield from ("--ro-bind", str(child), f"{SITE}/tilewise/{child.name}")
    if native is not None and native.__file__ and Path(native.__file__).parent != package:
        yield from ("--ro-bind", native.__file__, f"{SITE}/tilewise/{Path(native.__file__).name}")
    yield from ("--ro-bind", "/dev/null", f"{SITE}/tilewise/data/digits.npz")
    hidden = ["data/collections", *(["models/weights"] if hide_weights else [])]
    for name in hidden:
        if (package / name).is_dir():
            yield from ("--tmpfs", f"{SITE}/tilewise/{name}")


@dataclass(frozen=True)
class Prisoner:
    """A process in a jail: what started it, the number that it has outside, and what it says in the end."""

    process: subprocess.Popen[bytes]
    pid: int
    errors: IO[bytes]

    def last_words(self) -> str:
        """The last line that it wrote to standard error, without what a terminal would obey."""
        self.errors.seek(max(self.errors.seek(0, os.SEEK_END) - 4096, 0))
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        return "".join(c if c.isprintable() else "?" for c in said[-1][:200]) if said else ""


@contextmanager
def started(folder: Path, words: tuple[str, ...], threads: int, hide_weights: bool) -> Iterator[Prisoner]:
    """Python on `words` in a jail, with pipes for both ways; ended with the block.

    Standard error is a file, so that whoever warns a lot is not held up by a pipe that nobody empties; it can be added
    to and not read, so that it is no place to keep anything.
    """
    check()
    reader, writer = os.pipe()
    with tempfile.NamedTemporaryFile() as errors, Path(errors.name).open("ab", 0) as written:
        process = subprocess.Popen(
            command(folder, words, hide_weights, writer),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=written,
            env=environment(threads),
            pass_fds=(writer,),
            start_new_session=True,
            bufsize=0,
        )
        os.close(writer)
        try:
            with os.fdopen(reader, "rb") as stream:
                told = stream.read(4096)
            pid = int(json.loads(told)["child-pid"]) if told else process.pid
            with _ended(pid):
                yield Prisoner(process, pid, errors)
        finally:
            process.kill()
            process.communicate()


@contextmanager
def _ended(pid: int) -> Iterator[None]:
    """Kill the jail's first process with the block, and so everything in the jail.

    It does not end with bubblewrap by itself: whoever becomes another user is no longer told of its parent's end.
    """
    try:
        handle = os.pidfd_open(pid)  # of this very process: another may have its number by then
    except OSError:  # it has ended already
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], _SECONDS_TO_END)  # nothing of it runs on into the next measurement
        os.close(handle)


@lru_cache(maxsize=8)
def cores_for(threads: int) -> frozenset[int]:
    """The cores that both sides run on: as many as they have threads."""
    mine = sorted(os.sched_getaffinity(0))
    return frozenset(mine[-threads:])
