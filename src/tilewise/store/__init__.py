"""Measurements: what is measured, the store that keeps it in a file or in PostgreSQL, and one runtime of many readings.

problem.py     a problem, a configuration, a kernel
store.py       what is written and claimed; readable.py what is read; home.py and postgres.py where it lies
merge.py       one store into another; service.py a store at a distance, `tilewise serve`
aggregate.py   from readings to runtimes; frame.py the same as a table
"""
