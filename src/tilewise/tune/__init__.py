"""Tile spaces, collectors that measure them on a CPU or through Triton, and the store that keeps the measurements."""
