"""A machine's calibration: a minute of measuring, and the tile that follows for any shape."""
