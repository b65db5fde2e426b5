"""The leaderboard: an append-only, hash-chained ledger in SQLite or PostgreSQL, and what follows from it."""

from tilewise_arena.board.store import Board, open_board
from tilewise_arena.board.transactions import Transaction
from tilewise_arena.board.verify import Verdict, verify

__all__ = ["Board", "Transaction", "Verdict", "open_board", "verify"]
