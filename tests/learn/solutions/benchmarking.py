"""Answers to the exercises on benchmarking."""

import numpy as np


def take_turns(functions, rounds, clock):
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append(clock() - start)
    return times


def ratio_interval(old, new, rng):
    ratios = [np.median(rng.choice(old, len(old))) / np.median(rng.choice(new, len(new))) for _ in range(1000)]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def score(gains, accuracy, floor):
    return 0.0 if accuracy < floor else float(np.prod(gains) ** (1 / len(gains)))
