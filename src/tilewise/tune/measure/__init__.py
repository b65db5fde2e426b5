"""Measuring: devices and their clocks, sampling, the store, the collectors, and what is made of a store."""
