"""A small tensor framework made fast for real, and a learned cost model that picks its tile sizes."""

from tilewise._threads import get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = ["get_num_threads", "set_num_threads"]
