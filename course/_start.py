"""How every command here starts: tilewise is found even where it is not installed, and an error is one sentence."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).resolve().parent

if importlib.util.find_spec("tilewise") is None:
    sys.path.insert(0, str(_HERE.parent / "src"))
if str(_HERE) not in sys.path:
    sys.path.insert(0, str(_HERE))
if importlib.util.find_spec("numpy") is None:
    print(
        f"{Path(sys.argv[0]).name}: NumPy is not installed for {sys.executable}; `make run`, in the folder above, "
        "makes .venv, and .venv/bin/python has it.",
        file=sys.stderr,
    )
    sys.exit(2)
warnings.filterwarnings("ignore", message="tilewise's compiled kernels", category=RuntimeWarning)


def run(main: Callable[[], int | None]) -> None:
    """Run `main` and leave with its exit code; 2 and one line for an error that has a sentence."""
    from tilewise._wording import substitute_unencodable
    from tilewise.errors import TilewiseError

    substitute_unencodable(sys.stdout)
    substitute_unencodable(sys.stderr)
    try:
        code = main() or 0
        sys.stdout.flush()
        sys.exit(code)
    except TilewiseError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head`: whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except OSError as error:
        print(f"{Path(sys.argv[0]).name}: {error.filename or 'the system refused'}: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
