"""Where pages named the store; `tilewise.store.store` is the code."""

from tilewise.store.store import BatchRow, Machine, Store, Verdict

__all__ = ["BatchRow", "Machine", "Store", "Verdict"]
