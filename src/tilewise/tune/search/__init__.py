"""Searching: what to measure next, when to stop, and replays of both over recorded runtimes."""
