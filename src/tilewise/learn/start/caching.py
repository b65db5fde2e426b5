"""Exercises of the lesson on KV caching. Write the three functions, then run `tilewise check caching`."""


def attend(query, keys, values):
    """Compute attention for one query: softmax(keys @ query / sqrt(D)) @ values.

    `query` is (D,), `keys` and `values` are (T, D). The result must also be right for large scores, without overflow.
    """
    raise NotImplementedError


def store(keys, values, key, value, position):
    """Write `key` and `value` at `position` of the arrays `keys` and `values`, as in a KV cache.

    Return views (keys, values) of all rows up to and including this position.
    """
    raise NotImplementedError


def tokens_computed(prompt, new, cached):
    """Count the tokens that a model processes to generate `new` tokens after a prompt of `prompt` tokens.

    With a KV cache (`cached`), each token is processed once. Without one, the whole text is processed for each token.
    """
    raise NotImplementedError
