"""The red team's corpus: every cheat in `cheats/` is run in the sandbox and gets the sentence that its first line says.

`# refused: words` must be rejected with one of these words; `refused with weights.bin` is handed in with a file of one
byte; `harmless` is scored, and gains nothing by it; `harmless, memory below X` has a memory gain below X. `# honest`
and `# honest by hand` stand for an honest plugin's text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.test_plugins import completed
from tilewise.bench import Rejected, Settings, TooNoisy
from tilewise.bench.scoring import combined
from tilewise_arena.sandbox import bubblewrap, host, score_plugin

CHEATS = sorted((Path(__file__).parent / "cheats").glob("*.py"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(bubblewrap.unavailable_reason()), reason=bubblewrap.unavailable_reason()),
]


def test_the_corpus_is_large() -> None:
    assert len(CHEATS) >= 30


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda path: path.stem)
def test_a_cheat_gets_its_sentence(
    cheat: Path, tmp_path: Path, quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_ANSWER_SECONDS", 15.0)
    first, _, text = cheat.read_text().partition("\n")
    header = re.fullmatch(r"# (refused|harmless)( with weights\.bin)?(?:, memory below ([\d.]+))?: (.+)", first)
    assert header is not None
    (tmp_path / "plugin.py").write_text(completed(text)[0])
    if header[2]:
        (tmp_path / "weights.bin").write_bytes(b"x")
    settings = replace(quick, runs=12)
    if header[1] == "harmless":
        try:
            score = score_plugin(tmp_path / "plugin.py", "MLP_SPRINT", settings)
        except TooNoisy as error:  # named at the end of the run
            pytest.skip(str(error))
        assert score.score == pytest.approx(combined(score.speedup, score.memory_gain, score.size_gain))
        assert score.size_gain < 1.0 and score.memory_gain < float(header[3] or 1.25)  # as the honest one
        return
    with pytest.raises((Rejected, TooNoisy)) as raised:
        score_plugin(tmp_path / "plugin.py", "MLP_SPRINT", settings)
    if isinstance(raised.value, TooNoisy) and not re.search(header[4], str(raised.value)):
        pytest.skip(str(raised.value))
    assert re.search(header[4], str(raised.value)), str(raised.value)
