"""Validation of LightGBM's text format before LightGBM reads it.

LightGBM's reader trusts its input: a missing child or a list that is too short crashes the process. So the text of a
model file is parsed here, every list is counted and every number checked, and a new text with only the fields needed
for prediction is written. Trees with categorical splits or linear leaves, which tilewise never trains, are rejected.
"""

from __future__ import annotations

import math
import re

from tilewise.errors import FileFormatError

MAX_TEXT_BYTES = 64 << 20  # shipped models have about 1 MiB
_MAX_FEATURES = 100_000
_MAX_LEAVES = 1 << 20
_OBJECTIVE = re.compile(r"[a-z_0-9]{1,40}( [a-z_0-9]{1,30}:[0-9.e+-]{1,30}){0,4}")
_DECISIONS = frozenset(
    {"0", "2", "4", "6", "8", "10"}
)  # bit field of numerical splits: default direction and missing-value type


def checked_trees(text: str) -> str:
    """Return an equivalent text that LightGBM can read safely, or raise a FileFormatError."""
    if len(text) > MAX_TEXT_BYTES:
        raise FileFormatError(f"The model file holds trees of more than {MAX_TEXT_BYTES >> 20} MiB; train it again.")
    try:
        # The text is a header and one section per tree; what follows the last tree is not needed.
        head, *trees = text.partition("\nend of trees")[0].split("\nTree=")
        header = _fields(head)
        features = _whole(header["max_feature_idx"], _MAX_FEATURES) + 1
        # Only models with one output are supported.
        if (header["num_class"], header["num_tree_per_iteration"]) != ("1", "1"):
            raise ValueError("classes")
        if not _OBJECTIVE.fullmatch(header.get("objective", "regression")):
            raise ValueError("objective")
        sections = [_head(header, features, "average_output" in head.splitlines())]
        sections += [f"Tree={number}\n{_tree(_fields(tree), features)}\n\n" for number, tree in enumerate(trees)]
    except (ValueError, KeyError, IndexError) as error:
        raise FileFormatError("The model file holds no trees that LightGBM can read; train it again.") from error
    return "".join(sections) + "end of trees\n"


def _fields(text: str) -> dict[str, str]:
    """Parse lines of the form name=value."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _head(header: dict[str, str], features: int, averages: bool) -> str:
    """Write the header that LightGBM needs for prediction."""
    names = " ".join(f"Column_{number}" for number in range(features))
    lines = [
        "tree", "version=v4", "num_class=1", "num_tree_per_iteration=1", "label_index=0",
        f"max_feature_idx={features - 1}", f"objective={header.get('objective', 'regression')}",
        *(["average_output"] if averages else []),
        f"feature_names={names}", f"feature_infos={' '.join(['none'] * features)}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n\n"


def _tree(fields: dict[str, str], features: int) -> str:
    """Check one tree and write it with placeholders for the statistics that prediction does not need."""
    leaves = _whole(fields["num_leaves"], _MAX_LEAVES, least=1)
    # tilewise trains neither; their extra lists would need checks of their own.
    if fields.get("num_cat", "0") != "0" or fields.get("is_linear", "0") != "0":
        raise ValueError("categories or linear leaves")
    # A binary tree with n leaves has n - 1 splits.
    splits = leaves - 1
    lists = {
        "split_feature": _numbers(fields, "split_feature", splits),
        "split_gain": ["0"] * splits,
        "threshold": _numbers(fields, "threshold", splits),
        "decision_type": _numbers(fields, "decision_type", splits),
        "left_child": _numbers(fields, "left_child", splits),
        "right_child": _numbers(fields, "right_child", splits),
        "leaf_value": _numbers(fields, "leaf_value", leaves),
        "leaf_weight": ["1"] * leaves,
        "leaf_count": ["1"] * leaves,
        "internal_value": ["0"] * splits,
        "internal_weight": ["1"] * splits,
        "internal_count": ["1"] * splits,
    }
    # Every index must be in range, because LightGBM does not check it.
    for feature in lists["split_feature"]:
        _whole(feature, features - 1)
    if not _DECISIONS.issuperset(lists["decision_type"]):
        raise ValueError("decision")
    # Children must form a tree.
    for name in ("left_child", "right_child"):
        for node, child in enumerate(lists[name]):
            _check_child(int(child), node, splits, leaves)
    shrinkage = _finite(fields.get("shrinkage", "1"))
    body = "\n".join(f"{name}={' '.join(values)}" for name, values in lists.items())
    return f"num_leaves={leaves}\nnum_cat=0\n{body}\nis_linear=0\nshrinkage={shrinkage}\n"


def _check_child(child: int, node: int, splits: int, leaves: int) -> None:
    """Check a child: a later split, which also excludes cycles, or a leaf n written as -n - 1."""
    if not (node < child < splits or 0 <= -child - 1 < leaves):
        raise ValueError("child")


def _numbers(fields: dict[str, str], name: str, count: int) -> list[str]:
    """Read a list of finite numbers of the expected length."""
    numbers = fields.get(name, "").split()
    if len(numbers) != count:
        raise ValueError(name)
    return [_finite(number) for number in numbers]


def _finite(text: str) -> str:
    if not math.isfinite(float(text)) or not re.fullmatch(r"[-+0-9.eE]{1,40}", text):
        raise ValueError(text)
    return text


def _whole(text: str, most: int, least: int = 0) -> int:
    """Parse an integer between `least` and `most`."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ValueError(text)
    return int(text)
