"""What a plan leaves in memory: its own layers, and nothing that running the module once would keep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.passes import assert_passes_allocate_nothing
from tilewise import Tensor, models, nn, no_grad, plan
from tilewise._extension import native
from tilewise.backend import ConvTile
from tilewise.backend.registry import OptimizedBackend, use_backend
from tilewise.models import zoo
from tilewise.models.zoo.attention import Bert, VisionTransformer
from tilewise.quantize import quantize

pytestmark = pytest.mark.skipif(native is None, reason="plans need the compiled kernels")


def test_making_a_plan_keeps_no_weights_packed_for_single_layers() -> None:
    assert native is not None
    native.clear_weight_cache()
    limit = native.weight_cache_limit()
    plan.compile(models.resnet8().eval(), np.zeros((1, 3, 32, 32), np.float32))
    assert native.weight_cache_bytes() == 0
    assert native.weight_cache_limit() == limit


def test_what_others_keep_stays() -> None:
    assert native is not None
    native.clear_weight_cache()
    model, x = models.resnet8().eval(), np.zeros((1, 3, 32, 32), np.float32)
    with no_grad():
        model(Tensor(x))
    before = native.weight_cache_bytes()
    plan.compile(models.resnet8().eval(), x)
    assert native.weight_cache_bytes() >= before
    native.clear_weight_cache()


def test_layers_of_other_threads_keep_their_weights_while_a_plan_is_made() -> None:
    assert native is not None
    native.clear_weight_cache()
    convolution, x, outputs = nn.Conv2d(16, 16, 3, padding=1), np.ones((1, 16, 8, 8), np.float32), []

    class Meanwhile(nn.Module):
        """Runs a layer on another thread while it is traced."""

        def forward(self, x: Any) -> Any:
            def elsewhere() -> None:
                with no_grad():
                    convolution(Tensor(np.ones((1, 16, 8, 8), np.float32)))

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            outputs.append(native.weight_cache_bytes())
            return x * 2

    plan.compile(Meanwhile(), x)
    assert outputs[0] > 0
    native.clear_weight_cache()


def test_a_plan_holds_its_weights_once() -> None:
    """Filters that need no transform: what is held beside the images is their number, and a little for rounding up."""
    assert native is not None
    layers = nn.Sequential(*(nn.Conv2d(256, 256, 1, bias=False) for _ in range(8)))
    before = native.memory_in_use()
    network = plan.compile(layers, np.ones((1, 256, 4, 4), np.float32))
    bytes_in_use = native.memory_in_use() - before
    assert bytes_in_use < 1.25 * 8 * 256 * 256 * 4 + network.arena_bytes


def test_a_plan_for_a_batch_packs_no_weights_for_fewer_images() -> None:
    """Two and eight images of this size go by other algorithms, which want other forms of the filters."""
    assert native is not None
    native.set_num_threads(1)  # every thread has scratch of its own
    layers = nn.Sequential(*(nn.Conv2d(256, 256, 3, padding=1, bias=False) for _ in range(2)))
    before = native.memory_in_use()
    network = plan.compile(layers, np.ones((8, 256, 4, 4), np.float32))
    bytes_in_use, filters = native.memory_in_use() - before - network.arena_bytes, 2 * 256 * 256 * 9 * 4
    assert bytes_in_use < {"direct": 1.25, "winograd2": 2.0, "winograd": 4.25}[network.algorithms[0][1]] * filters + (
        4 << 20
    )


def test_transformed_filters_of_a_plan_are_bounded() -> None:
    """Half as many again as the weights, and 16 MiB; with scratch and what a vector rounds up."""
    assert native is not None
    native.set_num_threads(1)  # every thread has scratch of its own
    layers = nn.Sequential(*(nn.Conv2d(512, 512, 3, padding=1, bias=False) for _ in range(4))).eval()
    x, before = np.random.default_rng(0).standard_normal((1, 512, 16, 16), dtype=np.float32), native.memory_in_use()
    network = plan.compile(layers, x)
    weights = 4 * 512 * 512 * 9 * 4
    assert native.memory_in_use() - before - network.arena_bytes < 1.5 * weights + (16 << 20) + (8 << 20)
    assert "winograd_late" in {how for _, how in network.algorithms}
    want = layers(Tensor(x)).data
    assert np.abs(network(x) - want).max() <= 1e-5 * np.abs(want).max()


def test_a_second_size_packs_again_from_the_modules_weights() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval()
    small, large = (np.random.default_rng(0).standard_normal((1, 64, s, s), dtype=np.float32) for s in (1, 24))
    network = plan.compile(model, small)
    first = network.algorithms
    with no_grad():
        for x in (large, small):
            np.testing.assert_allclose(network(x), model(Tensor(x)).data, rtol=1e-3, atol=1e-4)
    network(large)
    assert first == [("0", "direct")] and network.algorithms[0][1].startswith("winograd")


@pytest.mark.parametrize("algorithm", ["direct", "winograd", "winograd2"])
def test_a_plan_uses_the_algorithm_that_was_tuned(algorithm: str) -> None:
    requests: list[Any] = []

    def tuned(*key: Any) -> ConvTile:
        requests.append(key)
        return ConvTile(algorithm)

    model, x = nn.Conv2d(32, 48, 3, padding=1).eval(), np.ones((1, 32, 12, 10), np.float32)
    with use_backend(OptimizedBackend(tile_chooser=tuned)):
        network = plan.compile(model, x)
    assert [how for _, how in network.algorithms] == [algorithm]
    assert ("conv2d", (1, 32, 12, 10, 48, 3, 3, 1, 1, 1, 1, 1), "float32", "nchw") in requests


def test_the_module_runs_before_the_plan_has_weights_of_its_own() -> None:
    """Both at once would be the most memory ever needed: layers pack their weights for as long as they run."""
    assert native is not None
    sizes: list[int] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            self.layers = nn.Sequential(*(nn.Conv2d(256, 256, 1, bias=False) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            sizes.append(native.memory_in_use())
            return self.layers(x)

    before = native.memory_in_use()
    plan.compile(Watched(), np.ones((1, 256, 4, 4), np.float32))
    assert len(sizes) == 2
    assert max(sizes) - before < 2 * 256 * 256 * 4


def test_results_of_the_module_are_given_back_before_the_plan_is_made() -> None:
    assert native is not None
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.GlobalAvgPool()).eval()
    plan.compile(model, np.ones((1, 3, 64, 64), np.float32))
    assert native.array_pool_bytes() < 64 * 64 * 64 * 4


def _networks() -> dict[str, Callable[[], tuple[Callable[[Any], Any], Any]]]:
    """Kinds of networks, each with an input, as what runs them: depthwise layers with gates, concatenations of
    channels, attention over patches and over ids, layers in INT8."""
    rng, noise = np.random.default_rng(0), np.random.default_rng(1)
    image, small = (noise.standard_normal((1, 3, s, s), dtype=np.float32) for s in (64, 32))
    ids = noise.integers(0, 50, (2, 13))
    return {
        "mobilenet_v3": lambda: (plan.compile(zoo.mobilenet_v3(), image), image),
        "unet": lambda: (plan.compile(zoo.unet(), small), small),
        "vit": lambda: (plan.compile(VisionTransformer(32, 8, 24, 2, 3, 7, rng), small), small),
        "bert": lambda: (plan.compile(Bert(2, 24, 3, 50, 16, rng), ids), ids),
        "int8": lambda: (quantize(zoo.mobilenet_v2(), [image]).run, image),
    }


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["mobilenet_v3", "unet", "vit", "bert", "int8"])
def test_passes_after_the_first_allocate_nothing(name: str, threads: int, settings_restored: None) -> None:
    """`benchmarks.memory --passes` does it a thousand times with the whole zoo."""
    assert native is not None
    native.set_num_threads(threads)
    compiled, x = _networks()[name]()
    assert_passes_allocate_nothing(compiled, x, 10)
