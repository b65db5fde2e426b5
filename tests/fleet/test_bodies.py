"""Bodies of questions: whatever is remembered of lists, every body means what JSON says it means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from tilewise.errors import Rejected
from tilewise.web.routes import parse_object
from tilewise_fleet.service.bodies import ListCache

LIST = [{"block": 2**i, "stages": 3} for i in range(20)]
TEXT = json.dumps(LIST)
WORDS = st.text('abc"\\[]{}:, \u00e9', max_size=12) | st.sampled_from(["configs", '"configs"', '"configs": [', "]"])
VALUES = st.recursive(
    st.none() | st.integers(-2, 9) | WORDS,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(WORDS, v, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(WORDS, VALUES, max_size=4)


def parse_or_error(parser: Any, body: bytes) -> Any:
    try:
        return parser(body)
    except Rejected as error:
        return str(error)


def test_a_list_that_came_before_is_the_same_object() -> None:
    lists = ListCache()
    first, second = (lists.parse(b'{"problem": %d, "configs": %s}' % (n, TEXT.encode())) for n in (1, 2))
    assert first["configs"] is second["configs"] and (first["problem"], second["problem"]) == (1, 2)


@given(before=FIELDS, after=FIELDS)
def test_what_stands_around_a_known_list_is_read_as_json_reads_it(before: Any, after: Any) -> None:
    lists = ListCache()
    lists.parse(b'{"configs": %s}' % TEXT.encode())
    around = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in before.items()]
    behind = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in after.items()]
    body = ("{" + ", ".join([*around, f'"configs": {TEXT}', *behind]) + "}").encode()
    assert parse_or_error(lists.parse, body) == parse_or_error(parse_object, body)


@given(
    at=st.integers(0, len(TEXT) + 40),
    put=st.sampled_from([b"", b'"', b"]", b"[", b"\\", b"}", b"-1", b" "]),
    cut=st.booleans(),
)
def test_a_damaged_body_is_refused_as_ever(at: int, put: bytes, cut: bool) -> None:
    lists = ListCache()
    whole = b'{"device": {"kind": "cpu"}, "configs": %s, "problem": {"m": 8}}' % TEXT.encode()
    lists.parse(whole)
    body = whole[:at] + put + whole[at + cut :]
    assert parse_or_error(lists.parse, body) == parse_or_error(parse_object, body)


@pytest.mark.parametrize("tail", ["]", '], "x": 1}', ']"}]}', ']zzz"}]}'])
def test_a_bracket_inside_a_word_is_no_end(tail: str) -> None:
    lists = ListCache()
    start = '{"configs": [' + "1, " * 200 + '{"a": "'
    lists.parse((start + ']"}]}').encode())
    body = (start + tail).encode()
    assert parse_or_error(lists.parse, body) == parse_or_error(parse_object, body)
