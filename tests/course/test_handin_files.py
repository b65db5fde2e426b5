"""What can be said of the hand-in without TensorFlow."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

COURSE = Path(__file__).resolve().parents[2] / "course"


def test_models_py_stands_alone() -> None:
    tree = ast.parse((COURSE / "models.py").read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert imported - set(sys.stdlib_module_names) <= {"tensorflow", "tensorflow_gnn", "numpy"}


def test_models_py_has_a_class_for_every_baseline() -> None:
    tree = ast.parse((COURSE / "models.py").read_text(encoding="utf-8"))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {"MLP", "LateJoinSAGE", "EarlyJoinSAGE", "LateJoinResGCN", "EarlyJoinResGCN"} <= classes
