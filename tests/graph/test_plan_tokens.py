"""Networks over tokens (B, T, C) in a plan: the module's numbers for odd sizes, in few native calls, whoever reads a
view of the heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewise import Tensor, get_num_threads, nn, no_grad, set_num_threads
from tilewise._extension import native
from tilewise.models.zoo.attention import Bert, EncoderLayer, VisionTransformer
from tilewise.nn import functional as F
from tilewise.plan import compile
from tilewise.profile import FLOPCounter
from tilewise.profile.flops import Recording, summarise

pytestmark = pytest.mark.skipif(native is None, reason="plans are native")


def tokens(*shape: int) -> Any:
    return np.random.default_rng(3).standard_normal(shape, dtype=np.float32)


def own_result(module: nn.Module, x: Any) -> Any:
    module.eval()
    with no_grad():
        return module(Tensor(x)).data


def assert_same(module: nn.Module, x: Any) -> Any:
    plan = compile(module, x)
    output, want = plan(x), own_result(module, x)
    assert output.shape == want.shape
    np.testing.assert_allclose(output, want, atol=2e-5 * max(1e-6, float(np.abs(want).max(initial=0))), rtol=0)
    return plan


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (1, 1), (1, 5), (3, 64), (2, 65), (1, 197), (2, 131)])
@pytest.mark.parametrize(("width", "heads"), [(35, 5), (6, 6), (64, 1), (48, 3)])
def test_an_encoder_layer_is_one_native_call(batch: int, length: int, width: int, heads: int) -> None:
    layer = EncoderLayer(width, heads, np.random.default_rng(0))
    assert assert_same(layer, tokens(batch, length, width)).native_calls == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("width", "heads", "length"), [(24, 2, 7), (33, 3, 70)])
def test_a_block_that_norms_first_is_one_native_call(width: int, heads: int, length: int, causal: bool) -> None:
    block = nn.TransformerBlock(width, heads, causal=causal, rng=0)
    assert assert_same(block, tokens(2, length, width)).native_calls == 1


def test_whole_networks() -> None:
    rng = np.random.default_rng(0)
    vit = VisionTransformer(48, 16, 36, 2, 3, 11, rng)
    assert assert_same(vit, tokens(3, 3, 48, 48)).native_calls <= 8
    bert, ids = Bert(2, 40, 4, 50, 64, rng), np.random.default_rng(1).integers(0, 50, (2, 13))
    plan = compile(bert, ids)
    np.testing.assert_allclose(plan(ids), own_result(bert, ids), atol=1e-4)
    assert plan.native_calls <= 3


def test_a_language_model_over_ids() -> None:
    model, ids = nn.GPT(2, 30, 3, vocab=17, context=40, rng=0), np.random.default_rng(1).integers(0, 17, (2, 40))
    np.testing.assert_allclose(compile(model, ids)(ids), own_result(model, ids), atol=1e-4)


class Separate(nn.Module):
    """Queries, keys and values from three layers, values wider than keys; the heads of the queries are read by somebody
    else too."""

    def __init__(self, peeks: bool) -> None:
        rng = np.random.default_rng(0)
        self.q, self.k, self.v = (nn.Linear(20, n, rng=rng) for n in (12, 12, 36))
        self.peeks = peeks

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).reshape(b, t, 4, -1).permute(0, 2, 1, 3) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=0.7)
        tokens_out = mixed.permute(0, 2, 1, 3).reshape(b, t, 36)
        if not self.peeks:
            return tokens_out
        return tokens_out * mixed.permute(0, 2, 1, 3)[:, :, 0, :1] + q.permute(0, 2, 1, 3).reshape(b, t, 12)[:, :, :1]


@pytest.mark.parametrize("peeks", [False, True])
def test_views_of_heads(peeks: bool) -> None:
    plan = assert_same(Separate(peeks), tokens(2, 9, 20))
    assert plan.native_calls == 1


class Reshapes(nn.Module):
    """Reshapes, permutations and indices that are no heads of anything."""

    def __init__(self) -> None:
        self.linear = nn.Linear(12, 24, rng=0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        parts = y.reshape(*y.shape[:2], 2, 3, 4).permute(2, 0, 1, 4, 3)
        transposed = y.permute(0, 2, 1).reshape(y.shape[0], 4, -1)
        other = (
            parts[1].sum(axis=(1, 2), keepdims=True)
            + parts[-1] * transposed.mean(axis=1, keepdims=True)[:, :, :1, None]
        )
        return other.reshape(2, -1) + y[:, 1].sum(axis=-1, keepdims=True) + y.reshape(2, -1)[:, :1]


def test_views_that_nothing_native_reads_run_as_written() -> None:
    assert_same(Reshapes(), tokens(2, 5, 12))


def test_nothing_past_the_given_array_is_read() -> None:
    """The last token lies at the end of its memory: guarded by the sanitizers' builds, and by NaN after it here."""
    room = np.full(2 * 3 * 5 + 16, np.nan, np.float32)
    x = room[:30].reshape(2, 3, 5)
    x[:] = tokens(2, 3, 5)
    assert_same(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7, rng=0)), x)


def test_nan_stays_with_its_token() -> None:
    layer, x = EncoderLayer(16, 2, np.random.default_rng(0)).linear1, tokens(1, 4, 16)
    x[0, 2, 3] = np.nan
    output = compile(layer, tokens(1, 4, 16))(x)
    assert np.isnan(output[0, 2]).all() and np.isfinite(output[0, [0, 1, 3]]).all()


def test_results_are_equal_bit_for_bit_on_any_number_of_threads() -> None:
    layer, x, before = EncoderLayer(48, 3, np.random.default_rng(0)), tokens(2, 77, 48), get_num_threads()
    plan = compile(layer, x)
    try:
        set_num_threads(1)
        alone = plan(x)
        set_num_threads(3)
        assert np.array_equal(alone, plan(x))
    finally:
        set_num_threads(before)


def test_a_plan_counts_what_the_module_counts() -> None:
    layer, x = EncoderLayer(32, 4, np.random.default_rng(0)), tokens(2, 10, 32)
    plan = compile(layer, x)
    with Recording() as recording:
        plan(x)
    assert summarise(recording.events).total == FLOPCounter().count_ops(layer, x).total
