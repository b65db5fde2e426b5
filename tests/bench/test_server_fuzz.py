"""The OpenAPI document taken at its word: whatever is sent, no answer that it does not list, and never a 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis", reason="schemathesis is not installed; `make test-server` installs it")

from tests.bench.site import Served
from tests.bench.test_board import made_up_score, recipe
from tilewise_arena.board import open_board, verify
from tilewise_arena.board.tokens import create_token

pytestmark = pytest.mark.slow
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
CHECKS += ",response_headers_conformance,unsupported_method,ignored_auth,negative_data_rejection"


@pytest.mark.parametrize("who", ["owls", "teacher", "nobody"])
def test_no_answer_is_undocumented_and_none_is_a_5xx(tmp_path: Path, who: str) -> None:
    path, key = tmp_path / "board.sqlite", tmp_path / "board.key"
    with open_board(path, key=key) as board:
        tokens = {"owls": create_token(board, "owls"), "teacher": create_token(board, "teacher", admin=True)}
        with board.write() as transaction:
            number = transaction.submit("rooks", recipe())["entry"]
            transaction.result(number, "scored", made_up_score().as_dict())
    served = Served(str(path), key, rate=0)  # the fuzzer is one client, and a busy one
    try:
        # `nobody` sends no token at all, so that the refusals are fuzzed too
        options = ["-H", f"Authorization: Bearer {tokens[who]}"] if who in tokens else []
        program = Path(sys.executable).with_name("schemathesis")
        limits = ["--max-examples", os.environ.get("TILEWISE_FUZZ_EXAMPLES", "40"), "--seed", "1", "--workers", "1"]
        command = [str(program), "run", f"{served.url}/openapi.json", "--checks", CHECKS, *limits, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    finally:
        served.stop()
    with open_board(path, key=key, create=False) as board:
        assert verify(board).good
