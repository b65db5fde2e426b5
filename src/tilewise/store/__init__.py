"""The measurement store, in a SQLite file or in PostgreSQL; start with `Store`, `Problem` and `read_measured`.

problem.py     problems, configurations and kernels
store.py       writing and claiming; reader.py reading; claims.py claims of collectors
database.py    the SQLite file; `tilewise_fleet/postgres.py` is the shared PostgreSQL database
merge.py       copying one store into another
aggregate.py   from timings to one runtime per configuration, also as a data frame
service.py     client of the tuning service, `tilewise fleet serve`
"""
