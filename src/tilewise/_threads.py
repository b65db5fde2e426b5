"""How many threads the native kernels use."""

from tilewise._extension import native
from tilewise.errors import ConfigurationError


def set_num_threads(n: int) -> None:
    """Use ``n`` threads in the native kernels (1 to 1024). The NumPy paths follow NumPy's own library."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 1024:
        raise ConfigurationError(f"the number of threads must be an integer between 1 and 1024, not {n!r}")
    if native is not None:
        native.set_num_threads(n)


def get_num_threads() -> int:
    """Threads the native kernels use; 1 where there are none."""
    return int(native.num_threads()) if native is not None else 1
