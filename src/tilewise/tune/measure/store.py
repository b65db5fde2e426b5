"""Compatibility module for documents that refer to this path; the code is in `tilewise.store.store`."""

from tilewise.store.store import BatchRow, Machine, Store, Verdict

__all__ = ["BatchRow", "Machine", "Store", "Verdict"]
