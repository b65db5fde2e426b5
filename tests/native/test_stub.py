"""The extension's types (_native.pyi) name nothing that the extension does not have."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tilewise
from tilewise._extension import native

STUB = Path(tilewise.__file__).with_name("_native.pyi")


@pytest.mark.skipif(native is None, reason="the extension is not installed")
def test_every_function_and_class_of_the_stub_is_in_the_extension() -> None:
    body = ast.parse(STUB.read_text(encoding="utf-8")).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(functions) > 80
    assert [name for name in functions if not hasattr(native, name)] == []
