"""No code compiled for one instruction set may be picked by the linker for another.

An inline function or template outside its set's namespace is emitted by every object that uses it, and the linker keeps
one copy: perhaps the AVX-512 one, on a machine without AVX-512. So the kernel objects are searched for such symbols.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_LINKAGE = re.compile(r"^\s*[0-9a-f]*\s+([WVuwv])\s+(.+)$")  # weak or unique: the linker chooses among copies


def kernel_objects(isa: str) -> list[Path]:
    """The objects of one set whose source is still there, in every build folder."""
    objects = ROOT.glob(f"build/**/kernels_{isa}.dir/native/kernels/*.o")
    return sorted(o for o in objects if (ROOT / "native" / "kernels" / o.stem).exists())


def shared_symbols(listing: str, isa: str) -> list[str]:
    """Symbols in `nm -C` output that another set's object could stand in for."""
    matches = [match for line in listing.splitlines() if (match := SHARED_LINKAGE.match(line))]
    return [m[2] for m in matches if f"tw::{isa}::" not in m[2] and not _is_harmless(m[0])]


def _is_harmless(line: str) -> bool:
    """Weak references to what lives elsewhere (no address), and the pointer to C++'s exception routine (no code)."""
    return line.lstrip().startswith(("w", "v")) or "DW.ref." in line


def test_the_search_finds_a_shared_symbol_and_passes_over_the_set_s_own() -> None:
    listing = """
0000000000000000 W float const& std::max<float>(float const&, float const&)
0000000000000000 W tw::avx2::micro_kernel<6, 2>(tw::avx2::MicroArgs const&)
0000000000000000 T tw::avx512::something
                 w __gmon_start__
                 U memcpy
"""
    assert shared_symbols(listing, "avx2") == ["float const& std::max<float>(float const&, float const&)"]


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_kernel_objects_share_no_symbol_with_another_instruction_set(isa: str) -> None:
    objects = kernel_objects(isa)
    nm = shutil.which("nm")
    if not objects or nm is None:
        pytest.skip("needs a build folder with kernel objects, and nm")
    for path in objects:
        listing = subprocess.run([nm, "-C", str(path)], capture_output=True, text=True, check=True).stdout
        assert shared_symbols(listing, isa) == [], f"{path.relative_to(ROOT)} shares symbols with other sets"
