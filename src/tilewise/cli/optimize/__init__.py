"""The commands that make a model fast: fit, quantize, prune, generate, and their before-and-after tables."""
