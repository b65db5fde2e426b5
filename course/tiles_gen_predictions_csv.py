"""Writes the five best configurations of every test kernel: predictions_model_output.csv, under its other name too.

python tiles_gen_predictions_csv.py --dir ~/out/tpugraphs_tiles/model_<hash>
"""

from __future__ import annotations

from pathlib import Path

import _start
from flags import course_dataset, find_model_dir, parser
from keras_env import hand_over, has_tensorflow, quiet_tensorflow
from scorers import add_model_flag, load_scorer_of, needs_keras

from tilewise.costmodel.course.predictions import INPUT_NAMES, padding_note, write_predictions
from tilewise.errors import ConfigurationError


def main() -> int:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--dir", required=True, help="the folder of a trained model")
    add_model_flag(flags)
    options = flags.parse_args()
    folder = find_model_dir(options.dir)
    if needs_keras(folder):
        if not has_tensorflow():
            return hand_over()
        quiet_tensorflow()
    test = course_dataset(options.data_root, options.cache_dir, options.toy_data, trained=True).test
    if not len(test):
        raise ConfigurationError("The collection has no test kernels to predict.")
    scorer = load_scorer_of(folder, options.model)
    rankings = {kernel.name: scorer.order(kernel)[:5].tolist() for kernel in test}
    # The course's scripts and its text call the file differently, so it is written under both names.
    for name in INPUT_NAMES:
        short = write_predictions(Path(name), rankings)
    if note := padding_note(short):
        print(note)
    print(f"wrote {' and '.join(INPUT_NAMES)}: {len(test)} kernels")
    return 0


if __name__ == "__main__":
    _start.run(main)
