"""Counting what a job imports: late imports count, preparation does not, and a rise fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import imported


def write_job(folder: Path, body: str, prepare: str = "") -> Path:
    """Write a job file whose `run` has the given body."""
    path = folder / "example.py"
    path.write_text(f'"""run an example"""\n{prepare}\ndef run():\n    {body}\n')
    return path


def test_imports_that_happen_late_count_with_their_lines(tmp_path):
    modules = imported.imported_modules(write_job(tmp_path, "import tilewise.errors"))
    assert set(modules) == {"tilewise", "tilewise._late", "tilewise.errors"}
    errors = Path(imported.ROOT, "src/tilewise/errors.py")
    assert modules["tilewise.errors"] == len(errors.read_text().splitlines())


def test_preparation_runs_first_and_does_not_count(tmp_path):
    prepare = "\ndef prepare():\n    import tilewise.errors\n    open('input.txt', 'w').close()\n"
    assert imported.imported_modules(write_job(tmp_path, "open('input.txt').close()", prepare)) == {}


def test_a_job_that_fails_says_so(tmp_path):
    with pytest.raises(SystemExit, match=r"The job failed; update its file in tools/jobs"):
        imported.imported_modules(write_job(tmp_path, "raise ValueError"))


def test_a_rise_fails_and_a_fall_lowers_the_ceiling(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(imported, "JOBS", {"example": write_job(tmp_path, "import tilewise")})
    ceilings = tmp_path / "ratchet.json"
    assert imported.main(["--lower", "--allow", "imported/example", "--reason", "first measurement"], ceilings) == 0
    assert imported.main([], ceilings) == 0
    write_job(tmp_path, "import tilewise.nn")
    assert imported.main([], ceilings) == 1
    assert "imported/example.files: " in capsys.readouterr().out
    write_job(tmp_path, "pass")
    assert imported.main(["--lower"], ceilings) == 0
    assert json.loads(ceilings.read_text())["imported"] == {"imported/example": {"files": 0, "imported_lines": 0}}


@pytest.mark.parametrize("name", imported.JOBS)
def test_every_job_runs(name):
    if name in ("inductor", "gguf"):
        pytest.importorskip({"inductor": "torch"}.get(name, name))
    assert len(imported.imported_modules(imported.JOBS[name])) > 10
    assert imported.title(imported.JOBS[name])
