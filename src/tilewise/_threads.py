"""The number of threads of the native kernels."""

from tilewise._extension import native
from tilewise.errors import ConfigurationError


def set_num_threads(n: int) -> None:
    """Use ``n`` threads in the native kernels (1 to 1024). NumPy's BLAS has its own setting."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 1024:
        raise ConfigurationError(f"the number of threads must be an integer between 1 and 1024, not {n!r}")
    if native is not None:
        native.set_num_threads(n)


def get_num_threads() -> int:
    """Return the number of threads of the native kernels; 1 if they are not installed."""
    return int(native.num_threads()) if native is not None else 1
