"""`make fuzz-paths`: hostile paths for every command that takes one.

    python -m fuzz.paths [--part 1/4] [--seed 0] [--only 'tiles describe']

A path is given wherever the command line takes one, found by asking it. What lies there is no file (a pipe, a device, a
loop of links), or a file that claims or unpacks to more than it is. A command may refuse it with one line and exit
code 2, or read it; never a traceback, a crash, ten seconds of CPU time or 512 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MOST_SECONDS, MOST_MIB = 10, 512
HUGE = 1 << 62


def _sparse(place: Path, size: int = 1 << 40) -> None:
    with place.open("wb") as stream:
        stream.truncate(size)


def _npy(shape: str, descr: str = "<f4") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def _zip_bomb(place: Path) -> None:
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x", "y", "node_feat", "config_feat", "schema"):
            archive.writestr(f"{name}.npy", _npy("(200000000,)") + bytes(1 << 26))


def _safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def _many_names() -> bytes:
    one = b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return _safetensors(b"{" + b",".join(one % i for i in range(200_000)) + b"}")


def _socket(place: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):  # a name too long for one
        server.bind(str(place))
    server.close()


def _content(content: bytes | Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda place: place.write_bytes(content() if callable(content) else content) and None


def _link(target: str) -> Callable[[Path], None]:
    return lambda place: place.symlink_to(target)


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "loop of links": lambda place: place.symlink_to(place.name),
    "dangling link": _link("nowhere/at/all"),
    "endless device": _link("/dev/zero"),
    "full device": _link("/dev/full"),
    "null device": _link("/dev/null"),
    "terminal": _link("/dev/tty"),
    "memory of the process": _link("/proc/self/mem"),
    "folder": lambda place: place.mkdir(),
    "terabyte of holes": _sparse,
    "empty": _content(b""),
    "one byte": _content(b"\n"),
    "zeros": _content(bytes(1 << 20)),
    "gzip bomb": _content(lambda: gzip.compress(gzip.compress(bytes(1 << 28), 9), 9)),
    "plain gzip bomb": _content(lambda: gzip.compress(bytes(1 << 30), 9)),
    "npz bomb": _zip_bomb,
    "npy of 2^62": _content(_npy(f"({HUGE}, 0)")),
    "npy of 10^12": _content(_npy("(1000000000000,)")),
    "deep JSON": _content(b"[" * 2_000_000),
    "long JSON": _content(lambda: b"[" + b"1," * 4_000_000 + b"1]"),
    "huge number": _content(b'{"m": ' + b"9" * 300_000 + b"}"),
    "header of 2^62": _content(_safetensors(b"{}")[:0] + struct.pack("<Q", HUGE) + b"{}"),
    "200,000 names": _content(_many_names),
    "shape of 2^62": _content(_safetensors(b'{"a":{"dtype":"F32","shape":[%d,0],"data_offsets":[0,0]}}' % HUGE)),
    "GGUF of 2^62 tensors": _content(b"GGUF" + struct.pack("<IQQ", 3, HUGE, HUGE)),
    "GGUF string of 2^62": _content(b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, HUGE)),
    "ONNX of 2^60 bytes": _content(b"\x08\x08:\xff\xff\xff\xff\xff\xff\xff\xff\x0f"),
    "SQLite header": _content(b"SQLite format 3\x00" + bytes(84) + bytes(4000)),
    "CSV of one line": _content(lambda: b"name,team\n" + b"a" * (5 << 20)),
    "nulls in text": _content(b"name\x00,team\n\xff\xfe\x00"),
}


WORDS = {"collection", "model", "models", "weights", "data", "where", "store", "stores", "sources", "into", "entry",
         "what", "script"}  # fmt: skip
WRITTEN = {("compete backup", "path"), ("run", "save"), ("generate", "cache")}  # the sweep's; the last is a switch
ENDLESS = ("compete serve", "compete work")


def places(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """(command, parameter) for every parameter that is read from: a path, or a word that may be one."""
    if hasattr(command, "commands"):
        return [place for name, child in command.commands.items() for place in places(child, (*path, name))]
    name = " ".join(path)
    if name in ENDLESS:
        return []
    path_options = [p for p in command.params if "Path" in str(p.type_descriptor.annotation) or p.name in WORDS]
    return [(name, p) for p in path_options if p.name not in _sweep().OUTPUTS and (name, p.name) not in WRITTEN]


def attempts() -> list[tuple[str, Any, str]]:
    commands = _sweep().COMMANDS
    places_of_paths = [one for name, command in commands.items() for one in places(command, (name,))]
    return [(name, parameter, kind) for name, parameter in places_of_paths for kind in HOSTILE]


def _sweep() -> Any:
    """The test that knows a working example of every command."""
    folder = str(Path(__file__).parents[1] / "cli")
    if folder not in sys.path:
        sys.path.append(folder)
    import test_sweep

    return test_sweep


def words_for(name: str, parameter: Any, place: str) -> list[str]:
    words = list(_sweep().with_value(name, parameter, place))
    return words if place in words else [*words, place]


def attempt(name: str, parameter: Any, kind: str) -> str:
    """What is wrong with what the command does; nothing where all is well."""
    with tempfile.TemporaryDirectory(prefix="paths-", ignore_cleanup_errors=True) as folder:
        place = Path(folder) / "hostile"
        HOSTILE[kind](place)
        words = words_for(name, parameter, str(place))
        transcript = Path(folder) / "said"
        child = os.fork()
        if not child:
            _command(words, folder, transcript)
        return _judge(child, transcript)


def _command(words: list[str], folder: str, output_file: Path) -> None:
    """In the child: the command, with what it says in a file."""
    os.setsid()
    out = os.open(output_file, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    os.environ["TILEWISE_CACHE"] = f"{folder}/cache"
    resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_SECONDS, 2 * MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 31, 1 << 31))
    sys.argv = ["tilewise", *words]
    code = 70
    try:
        from tilewise.cli.app import main

        main()
    except SystemExit as system_exit:
        code = int(system_exit.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _judge(child: int, output_file: Path) -> str:
    started, limit = time.monotonic(), 30 * MOST_SECONDS  # of the wall; the CPU has its own
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - started > limit:
            os.killpg(child, signal.SIGKILL)
            os.wait4(child, 0)
            return f"still there after {limit} s"
        time.sleep(0.02)
    text = output_file.read_text(errors="replace") if output_file.exists() else ""
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)}"
    grown = used.ru_maxrss / 1024 - _own_mib()
    if "Traceback" in text:
        return "traceback: " + text.strip().splitlines()[-1][:150]
    if used.ru_utime + used.ru_stime > MOST_SECONDS:
        return f"{used.ru_utime + used.ru_stime:.0f} s of CPU time"
    if grown > MOST_MIB:
        return f"{grown:.0f} MiB"
    if os.WEXITSTATUS(status) not in (0, 1, 2, 3):
        return f"exit code {os.WEXITSTATUS(status)}"
    return ""


def _own_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", help="such as 2/4: the second quarter")
    parser.add_argument("--count", type=int, default=0, help="this many, drawn (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one command")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no more after this long")
    options = parser.parse_args()
    trials = [one for one in attempts() if options.only in (None, one[0])]
    order = np.random.default_rng(options.seed).permutation(len(trials))
    at, parts = map(int, options.part.split("/"))
    selection = [trials[i] for i in order[: options.count or None]][at - 1 :: parts]
    failed, started = 0, time.monotonic()
    for done, (name, parameter, kind) in enumerate(selection):
        if options.seconds and time.monotonic() - started > options.seconds:
            selection = selection[:done]
            break
        wrong = attempt(name, parameter, kind)
        if wrong:
            failed += 1
            print(f"tilewise {name} {parameter.opts[0]}: {kind}: {wrong}", flush=True)
    print(f"{len(selection)} of {len(trials)} hostile paths, {failed} not refused as they should be", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
