"""Choosing a configuration: the tuner, the cache of choices, the framework's chooser, autotune and their checks."""
