"""Writes predictions_kaggle.csv: the 844 tile rows, matched by ID, and 50 placeholder layout rows.

    python create_kaggle_csv.py [--inputcsv predictions_model_output.csv]

The rows come from sample_submission.csv where it lies in the working folder, else from the ids that tilewise knows.
"""

from __future__ import annotations

from pathlib import Path

import _start
from flags import add_bool, parser

from tilewise.costmodel.course.predictions import find_predictions, write_kaggle


def main() -> int:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--inputcsv", default="", help="the predictions; else looked for in the working folder")
    add_bool(flags, "force", "write the file even where predictions are missing, as after --toy_data")
    options = flags.parse_args()
    sample = Path("sample_submission.csv")
    out = Path("predictions_kaggle.csv")
    path = find_predictions(options.inputcsv, Path.cwd())
    result = write_kaggle(out, path, sample if sample.is_file() else None, force=options.force)
    for note in result.notes:
        print(note)
    print(f"wrote {out}: {result.predicted} tile rows from {path}")
    return 0


if __name__ == "__main__":
    _start.run(main)
