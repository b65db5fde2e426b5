"""tilewise-arena: TinyMLPerf for a class.

- `board.open_board` opens a board: a sealed ledger of entries in SQLite or PostgreSQL.
- `server.create_app` serves it over HTTP, with pages, an API and workers that re-run entries.
- `sandbox.score_plugin` runs a stranger's program in a sandbox and scores it.

`grading` writes and grades assignments for otter-grader and nbgrader with the same sandbox.
"""

__version__ = "0.1.0"
