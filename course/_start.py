"""How every command here starts: tilewise is found even where it is not installed, and an error is one sentence."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).resolve().parent

if importlib.util.find_spec("tilewise") is None:
    sys.path.insert(0, str(_HERE.parent / "src"))
if str(_HERE) not in sys.path:
    sys.path.insert(0, str(_HERE))
warnings.filterwarnings("ignore", message="tilewise's compiled kernels", category=RuntimeWarning)


def run(main: Callable[[], int | None]) -> None:
    """Run `main` and leave with its exit code; 2 and one line for an error that has a sentence."""
    from tilewise.errors import TilewiseError

    try:
        sys.exit(main() or 0)
    except TilewiseError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
