"""The leaderboard: an append-only, hash-chained ledger in SQLite or PostgreSQL, and what follows from it."""

from tilewise_arena.board.store import Board, open_board
from tilewise_arena.board.transactions import BoardTransaction
from tilewise_arena.board.verify import BoardVerification, verify

__all__ = ["Board", "BoardTransaction", "BoardVerification", "open_board", "verify"]
