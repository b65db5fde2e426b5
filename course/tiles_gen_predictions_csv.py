"""Writes predictions_model_output.csv in the working folder: the five best configurations of every test kernel.

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
    out = Path(INPUT_NAMES[0])
    short = write_predictions(out, {kernel.name: scorer.order(kernel)[:5].tolist() for kernel in test})
    if note := padding_note(short):
        print(note)
    print(f"wrote {out}: {len(test)} kernels")
    return 0


if __name__ == "__main__":
    _start.run(main)
