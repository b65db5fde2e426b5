"""Layers written as their parts, by whatever author: a plan finds them and gives the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tilewise import Tensor, nn, no_grad, ops
from tilewise._extension import native
from tilewise.graph.passes.patterns import UnpaddedAvgPool, match_patterns, window_shares
from tilewise.graph.passes.views import indexed, permuted, reshaped, whole
from tilewise.nn.primitives import AvgPool2d
from tilewise.plan import compile, trace
from tilewise.tensor import apply, where

pytestmark = pytest.mark.skipif(native is None, reason="plans are native")

Function = Callable[..., Tensor]


class Written(nn.Module):
    """A function as a module, between linear layers that only a native plan runs in one call with it."""

    def __init__(self, function: Function, width: int = 24) -> None:
        self.before, self.after = nn.Linear(width, width, rng=0), nn.Linear(width, width, rng=1)
        self.function = function

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.after(self.function(self.before(x), *more))


def numbers(*shape: int) -> Any:
    return np.random.default_rng(3).standard_normal(shape, dtype=np.float32)


def planned(module: nn.Module, *inputs: Any) -> Any:
    plan = compile(module, *inputs)
    with no_grad():
        want = module.eval()(*map(Tensor, inputs)).data
    output = plan(*inputs)
    assert output.shape == want.shape
    np.testing.assert_allclose(output, want, atol=3e-5 * max(1e-6, float(np.abs(want).max(initial=0))), rtol=0)
    return plan


def operations(module: nn.Module, *inputs: Any) -> list[str]:
    """List the operations that remain after the patterns were matched."""
    return [node.operation.__name__ for node in match_patterns(trace(module, *inputs)).nodes]


# --- norms ---


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, True)


WEIGHT, BIAS = numbers(24), numbers(2, 24)[1]
NORMS: dict[str, Function] = {
    "as files before version 17 have it": lambda x: centred(x) / ((centred(x) ** 2.0).mean(-1, True) + 1e-5).sqrt(),
    "one difference": lambda x: (d := centred(x)) / ((d * d).mean(-1, True) + 1e-5).sqrt(),
    "one over the root": lambda x: (1.0 / ((centred(x) ** 2.0).mean(2, True) + 1e-3).sqrt()) * centred(x),
    "a power": lambda x: centred(x) * ((centred(x) ** 2.0).mean(-1, True) + 1e-3) ** -0.5,
    "a variance": lambda x: centred(x) / (x.var(-1, True, 0) + 1e-12).sqrt(),
}


@pytest.mark.parametrize("how", NORMS)
@pytest.mark.parametrize("affine", [False, True])
def test_a_layer_norm_written_as_its_parts_is_one(how: str, affine: bool) -> None:
    def norm(x: Tensor) -> Tensor:
        y = NORMS[how](x)
        return Tensor(WEIGHT) * y + Tensor(BIAS) if affine else y

    assert planned(Written(norm), numbers(2, 7, 24)).native_calls == 1


RMS_NORMS: dict[str, Function] = {
    "T5": lambda x: Tensor(WEIGHT) * (x * (1.0 / ((x**2.0).mean(-1, True) + 1e-6).sqrt())),
    "a quotient": lambda x: x / ((x * x).mean(-1, True) + 1e-6).sqrt() * Tensor(WEIGHT),
    "a power": lambda x: x * ((x**2.0).mean(-1, True) + 1e-5) ** -0.5,
}


@pytest.mark.parametrize("how", RMS_NORMS)
def test_an_rms_norm_written_as_its_parts_is_one(how: str) -> None:
    for shape in [(2, 7, 24), (5, 24), (1, 2, 3, 24)]:
        assert planned(Written(RMS_NORMS[how]), numbers(*shape)).native_calls == 1
    assert operations(Written(RMS_NORMS[how]), numbers(1, 3, 24)) == ["Linear", "RmsNorm", "Linear"]


NOT_NORMS: dict[str, Function] = {
    "another axis": lambda x: (x - x.mean(1, True)) / ((centred(x) ** 2.0).mean(-1, True) + 1e-5).sqrt(),
    "another power": lambda x: centred(x) / ((centred(x) ** 4.0).mean(-1, True) + 1e-5).sqrt(),
    "another value": lambda x: centred(x) / ((centred(x * x) ** 2.0).mean(-1, True) + 1e-5).sqrt(),
    "a sample's variance": lambda x: centred(x) / (x.var(-1, True, 1) + 1e-5).sqrt(),
    "not centred": lambda x: x / ((x**2.0).mean(-1, True) + 1e-5).sqrt(),
}


@pytest.mark.parametrize("how", NOT_NORMS)
def test_what_is_almost_a_layer_norm_stays_what_it_is(how: str) -> None:
    planned(Written(NOT_NORMS[how]), numbers(2, 7, 24))
    assert "LayerNorm" not in operations(Written(NOT_NORMS[how]), numbers(2, 7, 24))


# --- GELU ---


def erf(x: Tensor) -> Tensor:
    return apply(ops.Erf, x)


ROOT, TANH = math.sqrt(2), math.sqrt(2 / math.pi)
GELUS: dict[str, Function] = {
    "PyTorch's": lambda x: x * (erf(x / ROOT) + 1.0) * 0.5,
    "half first": lambda x: x * 0.5 * (1.0 + erf(x / ROOT)),
    "half with the function": lambda x: (0.5 * (1.0 + erf(x * (1 / ROOT)))) * x,
    "tanh, a power": lambda x: 0.5 * x * (1.0 + (TANH * (x + 0.044715 * x**3.0)).tanh()),
    "tanh, products": lambda x: x * (((x + x * x * x * 0.044715) * TANH).tanh() + 1.0) * 0.5,
    "tanh, taken out": lambda x: x * 0.5 * ((x * TANH * (1.0 + 0.044715 * x * x)).tanh() + 1.0),
}


@pytest.mark.parametrize("how", GELUS)
def test_gelu_written_as_its_parts_is_one(how: str) -> None:
    pattern = match_patterns(trace(Written(GELUS[how]), numbers(1, 3, 24)))
    assert [n.operation.__name__ for n in pattern.nodes] == [
        "Linear",
        "GeluTanh" if "tanh" in how else "Gelu",
        "Linear",
    ]
    assert planned(Written(GELUS[how]), numbers(2, 7, 24)).native_calls == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x * (((x + x * x * x * 0.0447) * TANH).tanh() + 1.0) * 0.5,
        lambda x: x * (erf(x / 1.4) + 1.0) * 0.5,
        lambda x: x * (erf(x / ROOT) + 1.0) * 0.6,
        lambda x: x * (erf(x / ROOT) + 1.1) * 0.5,
        lambda x: x * x * (erf(x / ROOT) + 1.0) * 0.5,
    ],
)
def test_what_is_almost_gelu_stays_what_it_is(other: Function) -> None:
    planned(Written(other), numbers(2, 7, 24))
    assert not {"Gelu", "GeluTanh"} & set(operations(Written(other), numbers(2, 7, 24)))


# --- attention ---


def attended(q: Tensor, k: Tensor, v: Tensor, where_to: str, mask: Callable[[Tensor], Tensor]) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1])
    keys_last = k.permute(0, 1, 3, 2)
    if where_to == "q":
        scores = (q * scale) @ keys_last
    elif where_to == "k before it is turned":
        scores = q @ (k * scale).permute(0, 1, 3, 2)
    elif where_to == "both":
        scores = (q * math.sqrt(scale)) @ (keys_last * math.sqrt(scale))
    elif where_to == "none":
        scores = q @ keys_last
    elif where_to == "zero":
        scores = (q @ keys_last) * 0.0
    else:
        scores = (q @ keys_last) / math.sqrt(q.shape[-1])
    return mask(scores).softmax(-1) @ v


def of_heads(
    x: Tensor, heads: int = 3, where_to: str = "scores", mask: Callable[[Tensor], Tensor] = lambda s: s
) -> Tensor:
    b, t, c = x.shape
    q, k, v = (x.reshape(b, t, heads, c // heads).permute(0, 2, 1, 3) for _ in range(3))
    return attended(q, k, v, where_to, mask).permute(0, 2, 1, 3).reshape(b, t, c)


SCALES = ["scores", "q", "k before it is turned", "both", "none"]


@pytest.mark.parametrize("where_to", SCALES)
@pytest.mark.parametrize(("batch", "length", "heads"), [(2, 7, 3), (1, 1, 3), (1, 70, 1), (3, 5, 24)])
def test_attention_written_as_its_parts_is_one(where_to: str, batch: int, length: int, heads: int) -> None:
    module = Written(lambda x: of_heads(x, heads, where_to))
    assert planned(module, numbers(batch, length, 24)).native_calls == 1


def early(t: int) -> Any:
    return np.tril(np.ones((t, t), bool))


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "chosen": lambda s: where(early(s.shape[-1]), s, float(np.finfo(np.float32).min)),
    "filled": lambda s: s.masked_fill(~early(s.shape[-1])[None, None], -math.inf),
    "added": lambda s: s + np.where(early(s.shape[-1]), 0, -1e9).astype(np.float32),
    "nothing": lambda s: s + np.zeros((1, 1, 1, s.shape[-1]), np.float32),
}


@pytest.mark.parametrize("how", MASKS)
def test_a_mask_of_what_comes_later_is_causal_attention(how: str) -> None:
    assert planned(Written(lambda x: of_heads(x, mask=MASKS[how])), numbers(2, 9, 24)).native_calls == 1


OTHER_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "some keys": lambda s: s + np.where(np.arange(s.shape[-1]) % 3 == 1, -1e9, 0).astype(np.float32),
    "a bias a head": lambda s: s + numbers(3, s.shape[-1], s.shape[-1]),
    "later ones": lambda s: s.masked_fill(early(s.shape[-1]) & ~np.eye(s.shape[-1], dtype=bool), -math.inf),
    "moderate": lambda s: where(early(s.shape[-1]), s, -3.0),
    "a query that sees nothing": lambda s: (
        s + np.where(np.arange(s.shape[-1])[:, None] == 2, -1e9, 0).astype(np.float32)
    ),
}


@pytest.mark.parametrize("how", OTHER_MASKS)
def test_other_masks_hide_what_they_hide(how: str) -> None:
    planned(Written(lambda x: of_heads(x, mask=OTHER_MASKS[how])), numbers(2, 9, 24))


def test_a_mask_that_comes_as_an_input() -> None:
    module = Written(lambda x, visible: of_heads(x, mask=lambda s: s + (1.0 - visible.reshape(2, 1, 1, 9)) * -1e30))
    visible = (np.arange(18).reshape(2, 9) % 4 != 1).astype(np.float32)
    planned(module, numbers(2, 9, 24), visible)


def test_a_scale_of_nothing_is_a_scale() -> None:
    """Every key counts the same, whether the scale is an option or a product."""

    def even(x: Tensor) -> Tensor:
        heads = x.reshape(2, 5, 3, 8).permute(0, 2, 1, 3)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, scale=0.0)
        return mixed.permute(0, 2, 1, 3).reshape(2, 5, 24)

    fused = Written(even)
    plan = planned(fused, numbers(2, 5, 24))
    assert plan.native_calls == 1
    np.testing.assert_allclose(np.ptp(plan(numbers(2, 5, 24)), axis=1), 0, atol=1e-6)
    planned(Written(lambda x: of_heads(x, where_to="zero")), numbers(2, 5, 24))


def tokens_second(x: Tensor) -> Tensor:
    """As PyTorch's own layer does it: (T, B, C), heads beside the batch, a linear layer over all rows."""
    b, t, c = x.shape
    y = x.permute(1, 0, 2)
    q, k, v = (y.reshape(t, b * 4, c // 4).permute(1, 0, 2) for _ in range(3))
    mixed = ((q * 0.3) @ k.permute(0, 2, 1)).softmax(-1) @ v
    return mixed.permute(1, 0, 2).reshape(t * b, c)


@pytest.mark.parametrize(("batch", "length"), [(2, 7), (1, 7), (5, 1), (1, 1)])
def test_heads_beside_the_batch(batch: int, length: int) -> None:
    class Layer(Written):
        def forward(self, x: Tensor) -> Tensor:
            b, t, c = x.shape
            return x + self.after(tokens_second(self.before(x))).reshape(t, b, c).permute(1, 0, 2)

    assert planned(Layer(lambda x: x), numbers(batch, length, 24)).native_calls == 1


def test_shares_that_somebody_else_reads_are_computed() -> None:
    class Peeks(Written):
        def forward(self, x: Tensor) -> Tensor:
            q = self.before(x).reshape(2, 5, 3, 8).permute(0, 2, 1, 3)
            shares = (q @ q.permute(0, 1, 3, 2)).softmax(-1)
            return self.after((shares @ q).permute(0, 2, 1, 3).reshape(2, 5, 24)) * shares.mean((1, 2, 3)).reshape(
                2, 1, 1
            )

    planned(Peeks(lambda x: x), numbers(2, 5, 24))


# --- views ---


def test_a_view_is_where_the_numbers_lie() -> None:
    """Random chains of reshapes, permutations and indices: what the view says lies there does."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(rng.choice([1, 2, 3, 4, 6], 3).tolist())
        x = np.arange(math.prod(shape)).reshape(shape)
        view, array = whole(0, shape), x
        for _ in range(5):
            view, array = _random_view_step(rng, view, array)
        assert view.shape == array.shape
        assert np.array_equal(_read(view, x), array)


def _random_view_step(rng: np.random.Generator, view: Any, viewed: Any) -> tuple[Any, Any]:
    kind = rng.integers(3)
    if kind == 0 and viewed.ndim:
        axes = tuple(rng.permutation(viewed.ndim).tolist())
        return permuted(view, axes), viewed.transpose(axes)
    if kind == 1 and viewed.ndim:
        low = int(rng.integers(viewed.shape[0]))
        index = (low,) if rng.integers(2) else (slice(low, None, int(rng.integers(1, 3))),)
        result = indexed(view, index)
        return (view, viewed) if result is None else (result, viewed[index])
    sizes = rng.permutation([f for n in viewed.shape for f in ([2, n // 2] if n % 2 == 0 and n else [n])]).tolist()
    cut = int(rng.integers(len(sizes) + 1)) if sizes else 0
    target = tuple(n for n in (math.prod(sizes[:cut]), *sizes[cut:]))
    result = reshaped(view, target)
    return (view, viewed) if result is None else (result, viewed.reshape(target))


def _read(view: Any, x: Any) -> Any:
    places = [np.full(view.shape, first) for first in view.first]
    for at, group in enumerate(view.groups):
        inner = np.arange(math.prod(a.size for a in group))
        for axis in reversed(group):
            step = (inner % axis.size) * axis.step
            inner = inner // axis.size
            places[axis.along] = places[axis.along] + step.reshape(
                [-1 if i == at else 1 for i in range(len(view.groups))]
            )
    return x[tuple(places)]


@pytest.mark.parametrize(("kernel", "stride", "padding"), [((3, 3), (1, 1), (1, 1)), ((3, 2), (2, 1), (1, 0))])
def test_a_mean_without_padding_is_one_pool(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    shares = window_shares((1, 4, 7, 6), kernel=kernel, stride=stride, padding=padding)

    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return apply(AvgPool2d, x, kernel=kernel, stride=stride, padding=padding) * shares

    x = numbers(2, 4, 7, 6)
    plan = planned(Pool(), x)
    assert plan.native_calls == 1
    (node,) = match_patterns(trace(Pool(), x)).nodes
    assert node.operation is UnpaddedAvgPool
    np.testing.assert_allclose(UnpaddedAvgPool().forward(x, **node.params), plan(x), rtol=1e-5, atol=1e-6)
