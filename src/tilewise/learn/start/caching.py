"""Exercises of the lesson on KV caching. Write the three functions, then run `tilewise check caching`."""


def attend(query, keys, values):
    """softmax(keys @ query / sqrt(width)) @ values, right for large scores too; query (D,), keys and values (T, D)."""
    raise NotImplementedError


def store(keys, values, key, value, position):
    """Write key and value at `position` of the arrays, and give (keys, values) up to and with it, as views."""
    raise NotImplementedError


def tokens_computed(prompt, new, cached):
    """How many positions go through the model in all, to generate `new` tokens after a prompt of `prompt` tokens."""
    raise NotImplementedError
