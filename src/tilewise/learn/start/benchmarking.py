"""Exercises of the lesson on benchmarking. Write the three functions, then run `tilewise check benchmarking`."""


def take_turns(functions, rounds, clock):
    """Time functions alternately, and return a dictionary {name: [seconds, ...]}.

    `functions` maps names to functions. In each round, call every function once; clock() returns the time in seconds.
    """
    raise NotImplementedError


def ratio_interval(old, new, rng):
    """Return the 95 % bootstrap interval (low, high) of the ratio median(old) / median(new).

    `old` and `new` are timings; `rng` is a NumPy Generator, with which you draw the samples.
    """
    raise NotImplementedError


def score(gains, accuracy, floor):
    """Return the geometric mean of three gains (speed, memory, size), or 0 if the accuracy is below `floor`."""
    raise NotImplementedError
