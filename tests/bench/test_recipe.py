"""Recipes: what is understood, and that everything else is refused with a reason and at no cost."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.bench import Rejected, TinyMLPerf, parse_recipe, read_recipe, reference_recipe
from tilewise.bench.jsontext import parse_json
from tilewise.bench.recipe import STEP_NAMES, file_inside


def test_every_event_that_is_timed_has_a_reference_recipe_that_reads_back_to_itself() -> None:
    for event in TinyMLPerf.events()[:3]:
        recipe = reference_recipe(event)
        assert recipe.event == event
        assert parse_recipe(json.dumps(recipe.as_dict())) == recipe


def test_a_recipe_that_states_its_own_figures_is_refused(mlp_recipe: dict[str, Any]) -> None:
    for claim in ("score", "speedup", "accuracy", "latency"):
        with pytest.raises(Rejected, match="the harness measures them"):
            parse_recipe(mlp_recipe | {claim: 99.0})


@pytest.mark.parametrize(
    "change",
    [
        {"tilewise": 2},
        {"tilewise": True},
        {"event": "SWIMMING"},
        {"event": 3},
        {"steps": []},
        {"steps": "quantize"},
        {"steps": [{"step": "exec", "code": "print()"}]},
        {"steps": [{"step": "quantize", "samples": 0}]},
        {"steps": [{"step": "quantize", "samples": 1.5}]},
        {"steps": [{"step": "prune", "sparsity": 1.0}]},
        {"steps": [{"step": "prune", "sparsity": True}]},
        {"steps": [{"step": "kv_cache"}]},
        {"steps": [{"step": "quantize"}, {"step": "prune", "sparsity": 0.5}]},
        {"steps": [{"step": "quantize"}, {"step": "quantize"}]},
        {"steps": [{"step": "backend"}]},
        {"steps": [{"step": "backend", "name": "native", "path": "x"}]},
        {"steps": [{"step": "backend", "name": "native"}] * 17},
        {"name": "x" * 81},
        {"name": "\n"},
    ],
)
def test_anything_unknown_or_out_of_range_is_refused(mlp_recipe: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(Rejected) as raised:
        parse_recipe(mlp_recipe | change)
    assert raised.value.code == "schema"


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from(STEP_NAMES),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    )
)
def test_no_json_gives_anything_but_a_recipe_or_a_rejection(value: Any) -> None:
    for content in (value, {"tilewise": 1, "event": "MLP_SPRINT", "steps": value}):
        with contextlib.suppress(Rejected):
            parse_recipe(json.dumps(content))


def test_a_deep_bomb_is_refused_before_it_is_parsed() -> None:
    started = time.process_time()
    for bomb in (b"[" * 60_000, b'{"a":' * 9_000, b'{"a":' * 9_000 + b"1" + b"}" * 9_000):
        with pytest.raises(Rejected) as raised:
            parse_json(bomb)
        assert raised.value.code == "too deep"
    assert time.process_time() - started < 5


def test_brackets_inside_strings_do_not_count_as_depth() -> None:
    assert parse_json(json.dumps({"a": '[[[[[[[[[[[[[[[[[[[[[[\\"[[[['})) is not None


def test_a_large_text_is_refused() -> None:
    with pytest.raises(Rejected) as raised:
        parse_json(b" " * 70_000)
    assert raised.value.code == "too large"


def test_repeated_keys_and_nan_are_refused() -> None:
    for text in ('{"a": 1, "a": 2}', '{"a": NaN}', "{"):
        with pytest.raises(Rejected):
            parse_json(text)


@pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "a/../../b", "./x", "a//b", "c:\\x", "..", ""])
def test_a_file_outside_the_recipes_folder_is_refused(mlp_recipe: dict[str, Any], name: str) -> None:
    with pytest.raises(Rejected, match="inside its own folder"):
        parse_recipe(mlp_recipe | {"steps": [{"step": "weights", "file": name}]})


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"x")
    folder = tmp_path / "entry"
    folder.mkdir()
    (folder / "w.safetensors").symlink_to(secret)
    with pytest.raises(Rejected, match="points outside"):
        file_inside(folder, "w.safetensors")


def test_the_digest_changes_with_the_recipe_and_with_its_files(tmp_path: Path, mlp_recipe: dict[str, Any]) -> None:
    steps = [{"step": "weights", "file": "w.safetensors"}]
    (tmp_path / "recipe.json").write_text(json.dumps(mlp_recipe | {"steps": steps}))
    digests = []
    for content in (b"one", b"two"):
        (tmp_path / "w.safetensors").write_bytes(content)
        digests.append(read_recipe(tmp_path / "recipe.json").digest())
    digests.append(parse_recipe(mlp_recipe).digest())
    assert len(set(digests)) == 3
