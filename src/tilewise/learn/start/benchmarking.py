"""Exercises of the lesson on benchmarking. Write the three functions, then run `tilewise check benchmarking`."""


def take_turns(functions, rounds, clock):
    """{name: [seconds, ...]}: call each function once a round, one after the other; clock() gives seconds."""
    raise NotImplementedError


def ratio_interval(old, new, rng):
    """(low, high): a 95 % bootstrap interval of median(old) / median(new); rng is a NumPy Generator."""
    raise NotImplementedError


def score(gains, accuracy, floor):
    """The geometric mean of three gains (speed, memory, size), and 0 where accuracy is below the floor."""
    raise NotImplementedError
