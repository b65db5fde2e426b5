"""Install tilewise into the environment that runs this script, and show the progress of the compiler.

    python tools/install.py --isas native . 'packages/tilewise-arena'

pip hides the compiler's output. This script shows its counter and, if it fails, its last lines and what to install.
tilewise is then installed without compiled kernels, so that everything still runs, and the exit code is 3: `make` tries
again the next time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NOT_COMPILED = 3  # exit code: installed, but without compiled kernels
_COUNTER = re.compile(r"\[(\d+)/(\d+)\]")
_ERROR = re.compile(r"error:|CMake Error|fatal|could not find|No such file|cannot find|terminated", re.IGNORECASE)
_LINES_SHOWN = 12
# The compiler's or CMake's words, and what to do about them.
_REMEDIES = (
    (r"Development\.Module|Python\.h|Python_INCLUDE_DIR", "Python's headers are missing: apt-get install python3-dev"),
    (r"No CMAKE_CXX_COMPILER|CMAKE_CXX_COMPILER.*not", "there is no C++ compiler: apt-get install g++"),
    (r"out of memory|Killed|cc1plus.*terminated", "the compiler ran out of memory: close other programs and try again"),
)


def main() -> int:
    """Install the requirements, without compiled kernels if they cannot be built, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isas", default="all", help="instruction sets to compile: all, or native for this machine's")
    parser.add_argument("requirements", nargs="+", help="what `pip install -e` is to install, the package first")
    arguments = parser.parse_args()
    # The long option: `-C` needs pip 23.1, and Debian 12 creates environments with 23.0.
    instruction_sets = f"--config-settings=cmake.define.TILEWISE_ISAS={arguments.isas}"
    output = list(_show_progress(_pip(arguments.requirements, [instruction_sets, "-v"])))
    if _has_kernels():
        return 0
    if not any(_COUNTER.search(line) or "CMake Error" in line for line in output):  # pip itself failed
        print("".join(output[-_LINES_SHOWN:]), file=sys.stderr)
        return 1
    print(_explain(output), file=sys.stderr)
    subprocess.run(_pip(arguments.requirements, ["-qq"]), env=os.environ | {"TILEWISE_PURE": "1"}, check=True)
    return NOT_COMPILED


def _pip(requirements: list[str], options: list[str]) -> list[str]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-c", "constraints.txt"]
    editable = [word for requirement in requirements for word in ("-e", requirement)]
    return [*pip, "--no-build-isolation", *options, *editable]


def _show_progress(command: list[str]) -> Iterator[str]:
    """Run a command and yield its output; its counter is kept on one line of a terminal, or printed every tenth."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        tenth = -1
        for line in process.stdout:
            yield line
            counter = _COUNTER.search(line)
            if counter is None:
                continue
            done, total = int(counter[1]), int(counter[2])
            if sys.stdout.isatty():
                print(f"\r  compiled {done} of {total} files", end="\n" if done == total else "", flush=True)
            elif done * 10 // total > tenth:
                tenth = done * 10 // total
                print(f"  compiled {done} of {total} files", flush=True)


def _has_kernels() -> bool:
    code = "import warnings; warnings.simplefilter('ignore'); from tilewise._extension import native; print(native)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TILEWISE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=Path.home()
    )
    return done.returncode == 0 and done.stdout.strip() != "None"


def _explain(output: list[str]) -> str:
    """The compiler's last words about its errors, and what to do."""
    errors = [line.strip() for line in output if _ERROR.search(line)][-_LINES_SHOWN:]
    text = "\n".join(errors)
    remedies = (remedy for pattern, remedy in _REMEDIES if re.search(pattern, text))
    remedy = next(remedies, "the compiler has to accept these sources: g++ 10 or newer does")
    return "\n".join(
        ["The kernels could not be compiled:", *(f"  {line}" for line in errors), f"To get them, {remedy}.",
         "tilewise runs without them on its slower NumPy paths; the next `make run` tries to compile them again."]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
