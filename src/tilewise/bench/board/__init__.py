"""The leaderboard: an append-only, hash-chained ledger in SQLite or PostgreSQL, and what follows from it."""

from tilewise.bench.board.store import Board, open_board
from tilewise.bench.board.transactions import Transaction
from tilewise.bench.board.verify import Verdict, verify

__all__ = ["Board", "Transaction", "Verdict", "open_board", "verify"]
