# refused: unable to open database file
import sqlite3


def load(event, folder):
    sqlite3.connect(folder / 'x.db').execute('create table t (a)')
    raise RuntimeError("it was allowed")
