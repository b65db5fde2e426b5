"""The sandbox of the open division: starts Python with access to nothing but what a plugin needs.

bubblewrap starts the process in new mount, process, network, IPC and host name namespaces. If the caller is root, the
process changes to an unused user without capabilities; otherwise it gets a new user namespace. It can read the
interpreter, NumPy, tilewise and its own folder, and write to a small scratch folder in memory. After Python has
started, the process installs a seccomp filter that this module compiles with libseccomp. All system calls that are not
on the list fail from then on: no programs, processes, sockets, signals or changes of the CPU affinity. If the system
does not support this, the open division is disabled.
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
SCRATCH_BYTES = 1 << 20  # arbitrary; counts as memory of a plugin that creates a file
_SUPERVISOR = f"{SITE}/tilewise_arena/sandbox/supervisor.py"
# How long to wait for a killed process, and how much longer the supervisor waits than the harness; arbitrary.
_KILL_SECONDS = 5.0
_CLONE_THREAD = 0x10000  # CLONE_THREAD of <sched.h>
# Flags of <sys/mman.h>. The kernel does not count huge pages as resident memory, nor pages of shared anonymous memory
# that are not mapped at the moment; MAP_SHARED_VALIDATE contains the bit of MAP_SHARED.
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x1, 0x20, 0x40000
_MADVISE_ALLOWED = (3, 14, 15)  # WILLNEED, HUGEPAGE, NOHUGEPAGE; others could hide memory from its measurement

# Files, memory, time, threads and synchronization; nothing that affects another process or the rights of this one.
_SYSTEM_CALLS = """
read write readv writev pread64 pwrite64 close close_range stat fstat lstat newfstatat statx
lseek mprotect mremap munmap brk rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack ioctl access faccessat
faccessat2 select pselect6 poll ppoll sched_yield nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time
times getrusage getpid gettid getppid getuid geteuid getgid getegid getgroups getcwd uname sysinfo sched_getaffinity
getcpu getrlimit fcntl dup dup2 dup3 getdents64 readlink readlinkat futex set_robust_list get_robust_list
rseq set_tid_address arch_prctl getrandom membarrier exit exit_group ftruncate fsync fdatasync flock unlink unlinkat
mkdir mkdirat rmdir umask statfs fstatfs fadvise64 mincore restart_syscall
"""


@lru_cache(maxsize=1)
def unavailable_reason() -> str:
    """Return why the sandbox cannot run on this system, or "" if it can."""
    if not sys.platform.startswith("linux"):
        return "the open division needs Linux"
    if shutil.which("bwrap") is None:
        return "the open division needs bubblewrap: apt-get install bubblewrap"
    try:
        seccomp_filter()
    except (ImportError, OSError, RuntimeError, ValueError):
        return "the open division needs libseccomp and its binding: pip install tilewise-arena"
    with tempfile.TemporaryDirectory(prefix="tilewise-sandbox-") as folder:
        arguments = ("-c", "import numpy, tilewise, os; os.listdir('/plugin')")
        probe = subprocess.run(
            command(Path(folder), arguments, hide_weights=True, info=None), capture_output=True, env=environment(1)
        )
    if probe.returncode:
        message = probe.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no error message"]
        return f"the open division is off: this system has no sandbox for plugins ({message[0][:200]})"
    return ""


def require_sandbox() -> None:
    """Raise an error if this system cannot run the sandbox."""
    reason = unavailable_reason()
    if reason:
        raise UnavailableError(reason)


@lru_cache(maxsize=1)
def seccomp_filter() -> bytes:
    """Compile the list of allowed system calls to a BPF program for this machine."""
    import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(seccomp.ERRNO(1))
    for name in _SYSTEM_CALLS.split():
        with contextlib.suppress(ValueError, RuntimeError, OSError):  # a call that this architecture lacks
            rules.add_rule(seccomp.ALLOW, name)
    rules.add_rule(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD))
    unnamed = os.O_TMPFILE & ~os.O_DIRECTORY  # a file that would not change its folder
    for name, flags in (("open", 1), ("openat", 2)):
        rules.add_rule(seccomp.ALLOW, name, seccomp.Arg(flags, seccomp.MASKED_EQ, unnamed, 0))
    rules.add_rule(seccomp.ERRNO(38), "clone3")  # ENOSYS: the C library then uses clone
    rules.add_rule(seccomp.ALLOW, "prlimit64", seccomp.Arg(2, seccomp.EQ, 0))  # allows reading a limit, not setting one
    for kind in (0, _MAP_ANONYMOUS):  # files, and private anonymous memory
        mask = _MAP_HUGETLB | _MAP_ANONYMOUS | (_MAP_SHARED if kind else 0)
        rules.add_rule(seccomp.ALLOW, "mmap", seccomp.Arg(3, seccomp.MASKED_EQ, mask, kind))
    for advice in _MADVISE_ALLOWED:
        rules.add_rule(seccomp.ALLOW, "madvise", seccomp.Arg(2, seccomp.EQ, advice))
    with tempfile.TemporaryFile() as stream:
        rules.export_bpf(stream)
        stream.seek(0)
        return stream.read()


def command(folder: Path, arguments: tuple[str, ...], hide_weights: bool, info: int | None) -> list[str]:
    """Return the command line that runs Python with `arguments` in a sandbox around the plugin's `folder`."""
    mounts = [*_interpreter(), *_packages(hide_weights), "--ro-bind", str(folder), PLUGIN]
    mounts = [*_parent_folders(mounts), *mounts]
    writable = ["--tmpfs", "/dev", *_devices(), "--size", str(SCRATCH_BYTES), "--perms", "1777", "--tmpfs", SCRATCH]
    read_only = ["--remount-ro", "/dev", "--remount-ro", "/"]
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:  # the process changes its user itself, see process.drop_root
        namespaces += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        namespaces += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    info_option = [] if info is None else ["--info-fd", str(info)]
    lifetime = ["--die-with-parent", "--new-session", "--as-pid-1", "--chdir", SCRATCH]
    python = str(Path(sys.executable).resolve())
    options = [*namespaces, *mounts, *writable, *read_only, *lifetime, *info_option]
    return [str(shutil.which("bwrap")), *options, python, "-S", "-P", *arguments]


def _devices() -> Iterator[str]:
    """Yield arguments that mount devices without storage, as others could hold unmeasured memory."""
    for name in ("/dev/null", "/dev/urandom"):
        yield from ("--dev-bind", name, name)


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a plugin's process, with one thread count for all libraries.

    OpenBLAS's idle threads would spin for 20 ms after each product, which counts as work between questions.
    """
    counts = {name: str(threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    python = {"PYTHONPATH": SITE, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "HOME": SCRATCH}
    counts["OPENBLAS_THREAD_TIMEOUT"] = "4"  # 2^4 cycles, the least
    return counts | python | {"TMPDIR": SCRATCH, "LANG": "C.UTF-8", "TILEWISE_CACHE": f"{SCRATCH}/cache"}


def fresh_user() -> int:
    """Return a random user id, which probably no other process has."""
    return 200_000 + secrets.randbelow(1_000_000)


def _parent_folders(mounts: list[str]) -> Iterator[str]:
    """Yield arguments that create the mounts' parent folders so that every user can read them."""
    folders = {parent for option in mounts if option.startswith("/") for parent in Path(option).parents}
    for folder in sorted(folders - {Path("/")}):
        yield from ("--perms", "0755", "--dir", str(folder))


def _interpreter() -> Iterator[str]:
    """Yield arguments that mount Python, its standard library without installed packages, and system libraries."""
    python = Path(sys.executable).resolve()
    own = {python, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))}
    own |= {path for path in Path(sys.base_prefix, "lib").glob("libpython*") if path.is_file()}
    for path in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        if Path(path).is_symlink():
            yield from ("--symlink", str(Path(path).readlink()), path)
        elif Path(path).is_dir():
            yield from ("--ro-bind", path, path)
    for file in sorted(own):
        if file.exists():
            yield from ("--ro-bind", str(file), str(file))
    for root in sorted(own | {Path("/usr/lib/python3")}):
        for name in ("site-packages", "dist-packages"):
            if (root / name).is_dir():
                yield from ("--tmpfs", str(root / name))
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")


def _packages(hide_weights: bool) -> Iterator[str]:
    """Yield arguments that mount NumPy, safetensors and tilewise; `hide_weights` leaves out shipped weights."""
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
class SandboxedProcess:
    """A running sandbox: bubblewrap's process, the supervisor's pid outside of it, and standard error."""

    process: subprocess.Popen[bytes]
    pid: int
    errors: IO[bytes]

    def program_pid(self) -> int:
        """Return the pid, outside of the sandbox, of the program in it; 0 if it has ended."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int(path.read_text().rpartition(")")[2].split()[1]) == self.pid:
                    return int(path.parent.name)
        return 0

    def last_error_line(self) -> str:
        """Return the last line of standard error, without control characters."""
        self.errors.seek(max(self.errors.seek(0, os.SEEK_END) - 4096, 0))
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return "".join(c if c.isprintable() else "?" for c in lines[-1][:200]) if lines else ""


@contextmanager
def start_process(
    folder: Path, module: str, arguments: tuple[str, ...], threads: int, hide_weights: bool, seconds: float
) -> Iterator[SandboxedProcess]:
    """Run a Python module in a sandbox, with pipes to and from it, until the `with` block ends.

    The supervisor (see `supervisor`) ends the sandbox if this process ends in any way, or a little after `seconds`.
    This process's ends of the pipes do not block. Standard error is a file, so that a process with many warnings does
    not block on a full pipe. The process can append to it but not read it, so that it cannot store data there.
    """
    require_sandbox()
    cores = ",".join(str(core) for core in sorted(sandbox_cores(threads)))
    program = (_SUPERVISOR, str(seconds + _KILL_SECONDS), cores, module, *arguments)
    reader, writer = os.pipe()
    with tempfile.NamedTemporaryFile() as errors, Path(errors.name).open("ab", 0) as error_stream:
        process = subprocess.Popen(
            command(folder, program, hide_weights, writer),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error_stream,
            env=environment(threads),
            pass_fds=(writer,),
            start_new_session=True,
            bufsize=0,
        )
        os.close(writer)
        assert process.stdin is not None and process.stdout is not None
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        try:
            with os.fdopen(reader, "rb") as stream:
                info = stream.read(4096)
            pid = int(json.loads(info)["child-pid"]) if info else process.pid
            with _kill_at_exit(pid):
                yield SandboxedProcess(process, pid, errors)
        finally:
            process.kill()
            process.stdin.close()
            process.stdout.close()
            process.wait(_KILL_SECONDS)


@contextmanager
def _kill_at_exit(pid: int) -> Iterator[None]:
    """Kill the first process of the sandbox, and thereby all processes in it, at the end of the block.

    `--die-with-parent` is not enough: Linux clears the parent-death signal of a process that changes its user.
    """
    try:
        handle = os.pidfd_open(pid)  # unlike a pid, it cannot refer to a later process
    except OSError:  # the process has ended already
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], _KILL_SECONDS)  # so that it cannot disturb the next measurement
        os.close(handle)


@lru_cache(maxsize=8)
def sandbox_cores(threads: int) -> frozenset[int]:
    """Return the CPU cores on which plugin and harness run, as many as they have threads."""
    cores = sorted(os.sched_getaffinity(0))
    return frozenset(cores[-threads:])
