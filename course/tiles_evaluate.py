"""Evaluates trained runs on all validation kernels and prints JSON: {K: {program: mean error}} for K = 1 and 5.

python tiles_evaluate.py --dirs=model_<hash>[,model_<hash>...]
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import _start
from flags import course_dataset, find_model_dir, parser
from keras_env import hand_over, has_tensorflow, quiet_tensorflow
from scorers import add_model_flag, load_scorer_of, needs_keras

KS = (1, 5)


def main() -> int:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--dirs", required=True, help="model folders, separated by commas")
    add_model_flag(flags)
    options = flags.parse_args()
    folders = [find_model_dir(text) for text in options.dirs.split(",") if text]
    if any(needs_keras(folder) for folder in folders):
        if not has_tensorflow():
            return hand_over()
        quiet_tensorflow()
    valid = course_dataset(options.data_root, options.cache_dir, options.toy_data, trained=True).valid
    errors: dict[int, dict[str, list[float]]] = {k: defaultdict(list) for k in KS}
    for folder in folders:
        scorer = load_scorer_of(folder, options.model)
        for kernel in valid:
            target, order = kernel.target, scorer.order(kernel)
            for k in KS:
                errors[k][kernel.program].append(float(target[order[:k]].min() / target.min() - 1.0))
    means = {k: {program: sum(v) / len(v) for program, v in by.items()} for k, by in errors.items()}
    print(
        "For K = 1 and 5, program by program: how much slower the best of the model's first K choices is than the "
        "fastest one (0.05 is 5 % slower), averaged over the program's validation kernels.",
        file=sys.stderr,
        flush=True,
    )
    print(json.dumps(means, indent=2, sort_keys=True))
    return 0


if __name__ == "__main__":
    _start.run(main)
