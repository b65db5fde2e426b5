"""Where measurements are kept between runs."""

from __future__ import annotations

from tilewise._files import cache_folder as cache_directory

__all__ = ["cache_directory"]
