"""What cheats gain over the honest plugin with the same algorithm: `python -m tests.bench.gain [NAMES]`, interleaved.

Prints the score of each harmless cheat relative to the honest entry's, with its parts; medians of ROUNDS runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.bench.honest import SETTINGS
from tests.bench.test_cheats import CHEATS
from tests.bench.test_plugins import completed
from tilewise.bench.scoring import Score
from tilewise.errors import TilewiseError
from tilewise_arena.sandbox import score_plugin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cheats to try; all harmless ones unless named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    texts = {path.stem: path.read_text() for path in CHEATS}
    names = options.names or [name for name, text in texts.items() if text.startswith("# harmless:")]
    settings = replace(SETTINGS, practice=True)
    for name in names:
        scores: dict[str, list[Score]] = {name: [], "honest": []}
        for _ in range(options.rounds):
            for side, text in zip(scores, completed(texts[name]), strict=True):
                with tempfile.TemporaryDirectory(prefix="tilewise-gain-") as folder:
                    path = Path(folder) / "plugin.py"
                    path.write_text(text)
                    try:
                        scores[side].append(score_plugin(path, "MLP_SPRINT", settings, options.threads))
                    except TilewiseError as error:
                        print(f"{name}: {side}: {error}", flush=True)
        if not all(scores.values()):
            continue
        gains = {}
        for part in ("score", "speedup", "memory_gain"):
            cheat, honest = (statistics.median(getattr(s, part) for s in scores[side]) for side in (name, "honest"))
            gains[part] = f"{part} {100 * (cheat / honest - 1):+.1f} %"
        print(f"{name:40s} {', '.join(gains.values())} ({len(scores[name])} runs)", flush=True)


if __name__ == "__main__":
    main()
