"""Find loops of the compiled kernels that keep their sums in memory: `python -m tools.loops [--build build/...]`.

A compiler with many variables alive may leave the accumulators of a register tile on the stack, and a loop then runs at
half its speed with the same results, so that no test notices. This tool reads the disassembly of a build (objdump) and
lists the functions in which many multiply-adds are followed by a store of their result.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

_FUNCTION = re.compile(r"[0-9a-f]+ <(.*)>:$")
_ADDS = re.compile(r"v(pdpbusd|pdpwssd|fmadd\d+ps|paddd)\b")
_STORE = re.compile(r"vmov\S+\s+(%\w+),-?0x[0-9a-f]+\(%r[sb]p\)")
# A function is suspicious from so many stores on, if they are this share of its multiply-adds. Both are arbitrary:
# loops with spilled sums have far more.
_MIN_STORES, _MIN_STORE_SHARE = 6, 0.3


def suspects(lines: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Yield function, multiply-adds, and how many of their results were stored on the stack before the next one."""
    function, result = "", ""
    adds: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    for line in lines:
        begins = _FUNCTION.match(line)
        if begins:
            function, result = begins[1], ""
            continue
        instruction = line.rsplit("\t", 1)[-1].strip()
        stored = _STORE.match(instruction)
        if _ADDS.match(instruction):
            adds[function] += 1
            result = instruction.rsplit(",", 1)[-1].strip()
        elif stored and stored[1] == result:
            stores[function] += 1
            result = ""
    for name, count in adds.items():
        if stores[name] >= _MIN_STORES and stores[name] > _MIN_STORE_SHARE * count:
            yield name, count, stores[name]


def main() -> None:
    """Print one row per suspicious function: instruction set, file, stores of multiply-adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"), help="where the kernels' object files are")
    options = parser.parse_args()
    objects = sorted(options.build.glob("**/kernels_*.dir/native/kernels/*.o"))
    if not objects or shutil.which("objdump") is None:
        sys.exit(f"there are no compiled kernels under {options.build}, or no objdump to read them with")
    for path in objects:
        command = ["objdump", "-d", "--no-show-raw-insn", "-C", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        isa = next(folder for folder in path.parts if folder.startswith("kernels_"))[len("kernels_") : -len(".dir")]
        for name, adds, stores in suspects(text.splitlines()):
            print(f"{isa:9} {path.name[:-2]:24} {stores:4} of {adds:4}  {name[:100]}")


if __name__ == "__main__":
    main()
