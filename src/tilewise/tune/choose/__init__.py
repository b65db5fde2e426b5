"""Choosing a configuration: the tuner, the cache of choices, the table of tuned tiles, autotune and their checks."""
