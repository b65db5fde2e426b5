"""What is said of a collection: every figure worked out by hand on a tiny one, and the embedded ones in full."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewise.costmodel.data.collection import Collection, MeasuredKernel
from tilewise.costmodel.data.dataset import embedded_collections
from tilewise.costmodel.data.describe import describe
from tilewise.costmodel.data.kernel import make_kernel
from tilewise.costmodel.data.schema import OPCODES, Schema
from tilewise.costmodel.data.writing import write_collection
from tilewise.errors import TilewiseError


def kernel(name: str, runtimes: list[int], default: int, deviation: float = 0.02) -> MeasuredKernel:
    count = len(runtimes)
    graph = (np.zeros((1, 140), np.float32), np.ones(1, np.uint8), np.empty((0, 2), np.int32))
    configs = np.arange(count, dtype=np.float32)[:, None]
    kernel_read = make_kernel(name, *graph, configs, np.array(runtimes), np.full(count, default))
    return MeasuredKernel(kernel_read, np.full(count, deviation), np.full(count, 3), {"family": "toy"})


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    splits = {
        "train": [kernel("a_1", [1000, 1100, 4000], 1100), kernel("a_2", [3000, 1000, 2000], 2000)],
        "valid": [kernel("b_3", [1000, 1500, 8000], 8000)],
        "test": [],
    }
    write_collection(tmp_path / "tiny.npz", Collection(Schema(("x",), {"name": "tiny"}), splits))
    return tmp_path / "tiny.npz"


def test_figures_are_what_hand_and_pencil_give(tiny: Path) -> None:
    figures = describe(tiny)
    assert (figures.splits["train"].kernels, figures.splits["train"].configs) == (2, 6)
    assert figures.splits["train"].programs == 1
    toy = figures.families["toy"]
    assert toy.best_us == (1.0, 1.0)
    assert toy.spread == pytest.approx(4.0)  # 4, 3, 8
    assert toy.median_config == pytest.approx(1.5)  # 1.1, 2, 1.5
    assert toy.default_loss == pytest.approx((0.1 + 1.0 + 7.0) / 3)
    # The second configuration loses least over the two train kernels: 10 % and nothing; half on the third.
    assert toy.fixed_loss == pytest.approx((0.1 + 0.0 + 0.5) / 3)
    assert toy.noise == pytest.approx(0.02, rel=1e-3)
    assert figures.programs["b"].kernels == 1


def test_without_recorded_noise_exact_repeats_tell_it(tmp_path: Path) -> None:
    kernel_a = kernel("a_1", [1000, 1010, 2000], 1000, deviation=np.nan)
    kernel_a.kernel.config_feat[1] = kernel_a.kernel.config_feat[0]
    write_collection(tmp_path / "t.npz", Collection(Schema(("x",)), {"train": [kernel_a]}))
    assert describe(tmp_path / "t.npz").families["toy"].noise == pytest.approx(0.0070, abs=1e-4)


def test_the_fifth_best_counts_where_there_are_five_and_a_kernel_without_the_fixed_choice_runs_its_default(
    tmp_path: Path,
) -> None:
    members = [kernel("a_1", [100, 160, 120, 130, 140, 900], 200), kernel("a_2", [100, 110, 120, 130], 130)]
    missing = kernel("a_3", [100, 300], 250)
    missing.kernel.config_feat[:] += 40  # none of the other kernels' configurations
    write_collection(tmp_path / "t.npz", Collection(Schema(("x",)), {"train": members, "test": [missing]}))
    toy = describe(tmp_path / "t.npz").families["toy"]
    assert toy.fifth_best_loss == pytest.approx(0.6)  # of the first kernel alone
    # Against the default the first configuration saves most: 1.0 and 0.3.
    assert toy.fixed_loss == pytest.approx((0 + 0 + 1.5) / 3)
    assert toy.best_us == (0.1, 0.1) and toy.configs == 12


def test_a_kernel_without_a_family_is_named_after_its_heaviest_operation(tmp_path: Path) -> None:
    members = []
    for number, opcodes in enumerate((["add"], ["reduce", "add"], ["reduce", "dot"], ["dot", "convolution"])):
        graph = (
            np.zeros((len(opcodes), 140), np.float32),
            np.array([OPCODES.index(name) for name in opcodes], np.uint8),
        )
        configs = (np.ones((2, 1), np.float32), np.array([5, 7]), np.array([5, 5]))
        unmeasured = make_kernel(f"a_{number}", *graph, np.empty((0, 2), np.int32), *configs)
        members.append(MeasuredKernel(unmeasured, np.full(2, np.nan, np.float32), np.ones(2, np.uint16), {}))
    write_collection(tmp_path / "t.npz", Collection(Schema(("x",)), {"valid": members}))
    figures = describe(tmp_path / "t.npz")
    assert list(figures.families) == ["convolution", "dot", "elementwise", "reduce"]
    # The two configurations are equal, so their two timings tell the noise.
    assert figures.total is not None and figures.total.noise == pytest.approx(np.std([5, 7], ddof=1) / 6)


def test_a_split_without_runtimes_is_counted_and_not_judged(tmp_path: Path) -> None:
    splits = {"train": [kernel("a_1", [1, 2], 1)], "test": [kernel("c_1", [0, 0], 0)]}
    write_collection(tmp_path / "t.npz", Collection(Schema(("x",)), splits))
    figures = describe(tmp_path / "t.npz")
    assert figures.splits["test"].kernels == 1
    assert not figures.splits["test"].labelled
    assert figures.total is not None
    assert figures.total.kernels == 1


@pytest.mark.parametrize("name", embedded_collections())
def test_embedded_collections_describe_themselves(name: str, tmp_path: Path) -> None:
    from tilewise.cli.tiles.describe import draw

    figures = describe(name)
    assert figures.name == name
    assert figures.hardware
    assert figures.total is not None
    assert figures.total.noise is not None
    assert figures.total.noise <= (0.05 if name == "cpu" else 0.03)  # the CPUs were shared with others
    draw(figures, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_nothing_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TilewiseError, match="There is no collection"):
        describe(tmp_path / "nowhere")
    (tmp_path / "mine.sqlite").write_bytes(b"SQLite format 3")
    with pytest.raises(TilewiseError, match="tilewise collect export"):
        describe(tmp_path / "mine.sqlite")
