"""The closed division: weights descend from the shipped ones, accuracy is that on new images, names do not count."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tilewise import save
from tilewise.bench import Rejected, Settings, TinyMLPerf, parse_recipe, reference_recipe
from tilewise.bench.build import build, build_stages
from tilewise.bench.runner import Runner, baseline
from tilewise.bench.scoring import score_recipe, validate_recipe
from tilewise.bench.validation import check_accuracy, likeness, read_images, validate
from tilewise.errors import UnavailableError

Weights = dict[str, npt.NDArray[Any]]
MLP, CNN = TinyMLPerf.MLP_SPRINT, TinyMLPerf.CNN_MARATHON


def shipped(event: Any) -> Weights:
    return {name: tensor.data.copy() for name, tensor in event.model().named_tensors()}


def entry(folder: Path, weights: Weights, *steps: dict[str, Any], event: str = "MLP_SPRINT") -> Any:
    save(weights, folder / "w.safetensors")
    first = {"step": "weights", "file": "w.safetensors"}
    return parse_recipe({"tilewise": 1, "event": event, "steps": [first, *steps]}, folder)


def hidden_model(rng: np.random.Generator, share: float) -> Weights:
    """Another model in the largest weights, and decoys with the shipped signs that make the whole look alike."""
    weights = shipped(MLP)
    for name, own in weights.items():
        if own.ndim > 1:
            hidden = rng.random(own.shape) < share
            decoys = np.sign(own) * np.minimum(np.abs(own), 0.5)
            weights[name] = np.where(hidden, rng.choice([-0.6, 0.6], own.shape), decoys).astype(np.float32)
    return weights


def test_a_model_hidden_among_decoys_is_seen_when_the_decoys_are_pruned(tmp_path: Path) -> None:
    weights = hidden_model(np.random.default_rng(0), 0.02)
    assert all(likeness(weights[n], own)[0] > 0.5 for n, own in shipped(MLP).items() if own.ndim > 1)
    with pytest.raises(Rejected, match="another model"):
        build(entry(tmp_path, weights, {"step": "prune", "sparsity": 0.98, "scope": "layer"}))


def test_weights_left_where_the_shipped_model_has_little_are_another_models(tmp_path: Path) -> None:
    weights = shipped(MLP)
    for name, own in weights.items():
        if own.ndim > 1:  # the right signs and sizes, but only of the smaller half
            weights[name] = np.where(np.abs(own) < np.median(np.abs(own)), own, 0)
    with pytest.raises(Rejected, match="are small"):
        build(entry(tmp_path, weights))


def test_honestly_retrained_and_pruned_weights_pass(tmp_path: Path) -> None:
    prune = {"step": "prune", "sparsity": 0.7, "epochs": 2, "sparse": False}
    trained = build(parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": [prune]})).model
    weights = {name: tensor.data for name, tensor in trained.named_tensors()}
    build(entry(tmp_path, weights, {"step": "prune", "sparsity": 0.75}))


def test_only_shipped_weights_are_retrained_or_shrunk(tmp_path: Path) -> None:
    for step in ({"step": "prune", "sparsity": 0.5, "epochs": 3}, {"step": "shrink", "sparsity": 0.5}):
        with pytest.raises(Rejected, match="shipped weights"):
            entry(tmp_path, shipped(CNN), step, event="CNN_MARATHON")


def test_the_step_weights_works_for_the_cnn(tmp_path: Path, quick: Settings) -> None:
    recipe = entry(tmp_path, shipped(CNN), event="CNN_MARATHON")
    assert validate_recipe(recipe, quick).accuracy > 0.97
    wrong = shipped(CNN)
    counter = next(name for name in wrong if name.endswith("num_batches_tracked"))
    wrong[counter] = wrong[counter].astype(np.float32)
    with pytest.raises(Rejected, match="holds int64"):
        build(entry(tmp_path, wrong, event="CNN_MARATHON"))


@pytest.mark.parametrize(("sparsity", "is_smaller"), [(0.5, True), (0.0001, False)])
def test_shrink_removes_hidden_units_of_the_mlp_or_is_rejected(sparsity: float, is_smaller: bool) -> None:
    step = {"step": "shrink", "sparsity": sparsity}
    recipe = parse_recipe({"tilewise": 1, "event": "MLP_SPRINT", "steps": [step]})
    if not is_smaller:
        with pytest.raises(Rejected, match="removes nothing at this sparsity"):
            build_stages(recipe)
        return
    dense, smaller = (dict(stage.runner.model.named_tensors()) for stage in build_stages(recipe))
    assert smaller["0.weight"].shape[0] == dense["0.weight"].shape[0] // 2


class KnowsTheHeldOut(Runner):
    """Answers the held-out images by heart and guesses on others: fine on public data, useless on new data."""

    def answer(self, inputs: Any) -> Any:
        logits = super().answer(inputs)
        public_inputs = {x.tobytes() for x in self.event.public_inputs()}
        for row, x in zip(logits, inputs, strict=True):
            if x.tobytes() not in public_inputs:
                row[:] = np.roll(row, 1)
        return logits


def test_answers_known_by_heart_fail_on_images_nobody_has(quick: Settings, tmp_path: Path) -> None:
    reference = baseline(MLP)
    learned = KnowsTheHeldOut(MLP, MLP.model(), reference.backend)
    with pytest.raises(Rejected, match="transformed and with new noise"):
        validate(learned, reference, quick)
    x, y = MLP.draw_labelled(np.random.default_rng(5), 200)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    with pytest.raises(Rejected, match="only the teacher has"):
        validate(learned, reference, replace(quick, images=str(tmp_path / "mine.npz")))
    assert "only the teacher has" in str(
        validate(reference, reference, replace(quick, images=str(tmp_path / "mine.npz"))).checks
    )


class WrongNowAndThen(Runner):
    """Answers a few images wrongly, but not those that it has learned."""

    learned: frozenset[bytes] = frozenset()

    def answer(self, inputs: Any) -> Any:
        logits = super().answer(inputs)
        for row, x in zip(logits, inputs, strict=True):
            if zlib.crc32(x.tobytes()) % 1000 < 12 and x.tobytes() not in self.learned:
                row[:] = np.roll(row, 1)
        return logits


def test_an_entry_that_has_learned_the_held_out_images_is_accepted_no_sooner(quick: Settings) -> None:
    """More than a point is lost on the held-out images, which chance can do, and less than that on new ones."""
    reference = baseline(MLP)
    honest = WrongNowAndThen(MLP, MLP.model(), reference.backend)
    knows = WrongNowAndThen(MLP, MLP.model(), reference.backend)
    knows.learned = frozenset(x.tobytes() for x in MLP.public_inputs())
    before, without, learned = (validate(runner, reference, quick).accuracy for runner in (reference, honest, knows))
    assert without < before - 0.01 and learned == before


def test_chance_alone_does_not_fail_an_entry_on_fresh_images() -> None:
    labels = np.zeros(400, np.int64)
    right, wrong = np.eye(10, dtype=np.float32)[[0]], np.eye(10, dtype=np.float32)[[1]]
    plain = np.repeat(right, 400, 0)
    close = plain.copy()
    close[:8] = wrong  # two points down by eight images, which chance can do
    check_accuracy(close, plain, labels, MLP, "images")
    close[:40] = wrong
    with pytest.raises(Rejected, match="more than 1 point"):
        check_accuracy(close, plain, labels, MLP, "images")


def test_the_teachers_images_must_be_images(tmp_path: Path, quick: Settings) -> None:
    reference = baseline(MLP)
    for content in (
        {"x": np.zeros((3, 8, 8))},
        {"x": np.zeros((3, 5)), "y": np.zeros(3)},
        {"x": np.zeros((1, 64)), "y": [99]},
    ):
        np.savez(tmp_path / "bad.npz", **content)  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match="images"):
            validate(reference, reference, replace(quick, images=str(tmp_path / "bad.npz")))


# --- the board ---


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    from starlette.testclient import TestClient

    from tests.bench.test_server import Site
    from tilewise_arena.board import open_board
    from tilewise_arena.server import create_app

    path = tmp_path / "b.sqlite"
    with open_board(path) as board, TestClient(create_app(path, has_truth=True)) as client:
        yield Site(client, board)


def test_the_same_recipe_under_a_new_name_is_the_same_entry(site: Any, mlp_recipe: dict[str, Any]) -> None:
    first = site.post("/api/entries", {"recipe": mlp_recipe | {"name": "one"}})
    again = site.post("/api/entries", {"recipe": mlp_recipe | {"name": "two"}})
    assert (again.status_code, again.json()["entry"]) == (409, first.json()["entry"])
    assert site.post("/api/entries", {"recipe": mlp_recipe | {"name": "two"}}, "rooks").status_code == 201


def test_the_same_file_under_a_new_name_is_the_same_entry(site: Any) -> None:
    codes = []
    for name in ("a.csv", "b.csv"):
        recipe = {"tilewise": 1, "event": "TILE_OLYMPIAD", "predictions": name}
        codes.append(site.post("/api/entries", {"recipe": recipe, "files": {name: "eA=="}}).status_code)
    assert codes == [201, 409]


def test_the_tile_olympiad_takes_so_many_entries_a_day(site: Any) -> None:
    import base64

    recipe = {"tilewise": 1, "event": "TILE_OLYMPIAD", "predictions": "p.csv"}
    codes = [
        site.post(
            "/api/entries", {"recipe": recipe, "files": {"p.csv": base64.b64encode(bytes([n])).decode()}}
        ).status_code
        for n in range(11)
    ]
    assert codes == [201] * 10 + [429]


@pytest.fixture(scope="module")
def practice() -> Any:
    """The reference entry of the tile olympiad, scored on the practice split."""
    return score_recipe(reference_recipe("TILE_OLYMPIAD"))


def test_without_a_truth_nobody_is_ranked_in_the_tile_olympiad(tmp_path: Path, practice: Any) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    from starlette.testclient import TestClient

    from tests.bench.test_server import Site
    from tilewise_arena.board import open_board
    from tilewise_arena.server import create_app

    recipe = {"tilewise": 1, "event": "TILE_OLYMPIAD", "predictions": "p.csv"}
    with open_board(tmp_path / "b.sqlite") as board, TestClient(create_app(tmp_path / "b.sqlite")) as client:
        answer = Site(client, board).post("/api/entries", {"recipe": recipe, "files": {"p.csv": "eA=="}})
        assert answer.status_code == 409 and "only the teacher has" in answer.json()["detail"]
        with pytest.raises(Rejected, match="only the teacher has"):
            board.add_scored("owls", reference_recipe("TILE_OLYMPIAD"), practice)


def test_the_reference_entry_of_the_tile_olympiad_is_scored(practice: Any) -> None:
    assert practice.score > 0.9


@pytest.mark.parametrize(("value", "label"), [(1.5, 0), (-0.1, 0), (np.nan, 0), (0.5, 10), (0.5, -1)])
def test_images_outside_the_allowed_values_are_refused_with_what_is_allowed(
    tmp_path: Path, value: float, label: int
) -> None:
    event = TinyMLPerf.MLP_SPRINT
    path = tmp_path / "images.npz"
    np.savez(path, x=np.full((1, *event.input_shape), value, np.float32), y=np.array([label]))
    with pytest.raises(UnavailableError, match="must have finite values from 0 to 1 and classes from 0 to 9"):
        read_images(path, event)
