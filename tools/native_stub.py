"""Write src/tilewise/_native.pyi, the types of the compiled extension, from the extension itself.

    python -m tools.native_stub

nanobind knows the signatures of its own functions. Functions written against Python's C interface, whose calls have to
be cheap, have none; theirs are listed here. Run this tool after a binding was added or changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "src" / "tilewise" / "_native.pyi"
_GEOMETRY = "stride: tuple[int, int] = ..., padding: tuple[int, int] = ..., groups: int = ..."
# Signatures of the C functions; those not listed take arrays and return an array.
SIGNATURES = {
    "matmul": "(a: Array, b: Array, tile: Any = ..., *, bias: Array | None = ..., activation: str | None = ..., "
    "residual: Array | None = ...) -> Array",
    "matmul_suits": "(a: Any, b: Any, tile: Any = ..., **options: Any) -> str | None",
    "matmul_plan": "(a: Array, b: Array, threads: int = ...) -> tuple[str, tuple[int, ...]]",
    "matmul_tile_key": "(a: Array, b: Array) -> tuple[tuple[int, int, int], str] | None",
    "conv2d": f"(x: Array, w: Array, bias: Array | None = ..., {_GEOMETRY}, activation: str | None = ..., "
    "residual: Array | None = ..., tile: Any = ...) -> Array",
    "conv_suits": "(x: Any, *rest: Any, **options: Any) -> str | None",
    "pool_suits": "(x: Any, *rest: Any, **options: Any) -> str | None",
    "why_not_float32": "(*arrays: Any) -> str | None",
}


def stub_text() -> str:
    """Return the stub as nanobind writes it, with plain array types and the C functions' signatures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "_native.pyi"
        words = ["-m", "nanobind.stubgen", "-q", "-m", "tilewise._native", "-o", str(path)]
        subprocess.run([sys.executable, *words], check=True)
        text = path.read_text(encoding="utf-8")
    text = re.sub(r"Annotated\[(NDArray(?:\[[\w.]+\])?), dict\([^\[\]]*?\)\]", r"\1", text)
    text = re.sub(r"\bNDArray\b(?!\[)", "Array", text).replace("import Array", "import NDArray")
    text = text.replace("\n\ndef ", "\n\nArray = NDArray[Any]\n\ndef ", 1)

    def signed(match: re.Match[str]) -> str:
        return f"def {match[1]}{SIGNATURES.get(match[1], f'({_any(match[2])}) -> Any')}:"

    text = text.replace("def __len__(self, /):", "def __len__(self, /) -> int:")
    text = re.sub(r"=\([\d, ]*\)", "=...", text)
    text = re.sub(r"\bdef (\w+)\(([^:()]*)\)(?: -> Any)?:", signed, text)
    return re.sub(r"\blist\b(?!\[)", "list[Any]", re.sub(r"\btuple\b(?!\[)", "tuple[Any, ...]", text))


def _any(parameters: str) -> str:
    """Annotate parameters without types as `Any`."""
    names = [name.strip() for name in parameters.split(",") if name.strip()]
    return ", ".join(name if name in "/*" else re.sub(r"^([*\w]+)", r"\1: Any", name) for name in names)


def main() -> None:
    TARGET.write_text(stub_text(), encoding="utf-8")
    ruff = Path(sys.executable).with_name("ruff")
    subprocess.run([ruff, "check", "-q", "--fix", TARGET], check=False, stdout=subprocess.DEVNULL)
    subprocess.run([ruff, "format", "-q", TARGET], check=True)


if __name__ == "__main__":
    main()
