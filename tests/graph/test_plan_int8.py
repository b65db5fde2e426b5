"""Dynamic int8 linear layers inside float graphs: one native call, the numbers of the layers themselves."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise import Tensor, explain, nn, no_grad
from tilewise._extension import native
from tilewise.nn import functional
from tilewise.plan import compile
from tilewise.quantize import QuantizedLinear, quantize

pytestmark = pytest.mark.skipif(native is None, reason="plans are compiled")


class TokenMixer(nn.Module):
    """Two int8 layers on the same tokens, an activation between layers, and a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        rng = np.random.default_rng(4)
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = QuantizedLinear(width, hidden, rng=rng), QuantizedLinear(width, hidden, rng=rng)
        self.down = QuantizedLinear(hidden, width, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        hidden = functional.relu(self.up(tokens)) * self.gate(tokens)
        return x + self.down(hidden)


@pytest.mark.parametrize("shape", [(2, 5, 24), (1, 7, 37), (3, 4, 6, 256), (4, 24)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_planned_int8_linear_layer_gives_the_bits_of_the_layer(shape: tuple[int, ...], threads: int) -> None:
    rng = np.random.default_rng(0)
    layer, x = QuantizedLinear(shape[-1], 19, rng=rng), rng.standard_normal(shape).astype(np.float32)
    native.set_num_threads(threads)
    try:
        for isa in native.supported_isas():
            native.set_isa(isa)
            with no_grad():
                expected = layer(Tensor(x)).data
            plan = compile(layer, x)
            assert plan.native_calls == 1
            np.testing.assert_array_equal(plan(x), expected, err_msg=isa)
    finally:
        native.set_isa(native.supported_isas()[-1])
        native.set_num_threads(1)


@pytest.mark.parametrize(("width", "hidden"), [(16, 40), (33, 256)])
def test_int8_layers_norms_and_residuals_share_one_native_call(width: int, hidden: int) -> None:
    mixer = TokenMixer(width, hidden).eval()
    x = np.random.default_rng(1).standard_normal((2, 9, width)).astype(np.float32)
    with no_grad():
        expected = mixer(Tensor(x)).data
    plan = compile(mixer, x)
    assert plan.native_calls == 1
    np.testing.assert_allclose(plan(x), expected, atol=2e-2 * np.abs(expected).max())


def test_a_quantized_transformer_is_one_native_call() -> None:
    block = nn.TransformerBlock(32, 4).eval()
    x = np.random.default_rng(2).standard_normal((2, 6, 32)).astype(np.float32)
    small = quantize(block, [x])
    plan = compile(small, x)
    assert plan.native_calls == 1
    expected = compile(block, x)(x)
    assert np.abs(plan(x) - expected).max() < 0.03 * np.abs(expected).max()


def test_a_network_of_int8_layers_plans_itself() -> None:
    mixer = TokenMixer(16, 40).eval()
    x = np.random.default_rng(5).standard_normal((2, 9, 16)).astype(np.float32)
    with no_grad():
        first, second = mixer(Tensor(x)).data, mixer(Tensor(x)).data
    np.testing.assert_array_equal(first, second)
    assert "planned in 1 native call" in explain(mixer)
