"""The LLaMA layers: values and gradients are PyTorch's, the decoder agrees with the layers, a cache changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as tf

from tilewise import Tensor, nn
from tilewise._extension import native
from tilewise.errors import ConfigurationError, ShapeError
from tilewise.generate import generate, make_engine, new_cache
from tilewise.generate.engine import ModelEngine
from tilewise.nn import Linear, Llama, LlamaConfig
from tilewise.nn.llama import rotary_frequencies, rotate

SHAPES = [(4, 4, True), (4, 2, False), (6, 1, True)]  # heads, heads with keys, pairs side by side


def config(heads: int = 4, kv_heads: int = 2, interleaved_rope: bool = True, **more: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {"layers": 2, "width": 48, "hidden": 80, "vocab": 31, "context": 64}
    return LlamaConfig(heads=heads, kv_heads=kv_heads, interleaved_rope=interleaved_rope, **(sizes | more))


def torch_rotate(x: torch.Tensor, frequencies: np.ndarray, interleaved_rope: bool) -> torch.Tensor:
    """As complex numbers: another way than ours."""
    pairs = len(frequencies)
    halves = x.unflatten(-1, (pairs, 2)) if interleaved_rope else x.unflatten(-1, (2, pairs)).transpose(-1, -2)
    angles = torch.outer(torch.arange(x.shape[-2]).double(), torch.from_numpy(frequencies).double())
    turned = torch.view_as_real(
        torch.view_as_complex(halves.double().contiguous()) * torch.polar(torch.ones(()).double(), angles)
    )
    return (turned if interleaved_rope else turned.transpose(-1, -2)).flatten(-2).to(x.dtype)


def torch_model(model: Llama, ids: np.ndarray, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    c = model.config
    x = parameters["token_embedding.weight"][torch.from_numpy(ids)]
    for i in range(c.layers):
        p = {name.removeprefix(f"blocks.{i}."): value for name, value in parameters.items()}
        h = tf.rms_norm(x, (c.width,), p["norm1.weight"], c.eps)
        q, k, v = (
            tf.linear(h, p[f"self_attn.{name}_proj.weight"], p.get(f"self_attn.{name}_proj.bias"))
            .unflatten(-1, (-1, c.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        q, k = (torch_rotate(each, c.frequencies, c.interleaved_rope) for each in (q, k))
        mixed = tf.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + tf.linear(mixed.transpose(1, 2).flatten(2), p["self_attn.o_proj.weight"])
        h = tf.rms_norm(x, (c.width,), p["norm2.weight"], c.eps)
        gate, up = (tf.linear(h, p[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + tf.linear(tf.silu(gate) * up, p["mlp.down_proj.weight"])
    return tf.linear(tf.rms_norm(x, (c.width,), parameters["norm.weight"], c.eps), parameters["head.weight"])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "interleaved_rope"), SHAPES)
def test_logits_and_all_gradients_are_pytorchs(heads: int, kv_heads: int, interleaved_rope: bool, bias: bool) -> None:
    model = Llama(config(heads, kv_heads, interleaved_rope, qkv_bias=bias), rng=1)
    rng = np.random.default_rng(0)
    for name, tensor in model.named_tensors():
        if "norm" in name:
            tensor.data[...] = rng.uniform(0.5, 1.5, tensor.shape)
    ids, weigh = rng.integers(0, 31, (2, 7)), rng.standard_normal((2, 7, 31)).astype(np.float32)
    theirs = {name: torch.tensor(t.data, requires_grad=True) for name, t in model.named_tensors()}
    expected = torch_model(model, ids, theirs)
    found = model(ids)
    np.testing.assert_allclose(found.data, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    (found * weigh).sum().backward()
    (expected * torch.from_numpy(weigh)).sum().backward()
    for name, tensor in model.named_tensors():
        gradient = theirs[name].grad
        assert gradient is not None
        assert tensor.grad is not None, name
        np.testing.assert_allclose(np.asarray(tensor.grad), gradient.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


def test_rotary_positions_leave_the_rest_of_a_head_alone() -> None:
    x = np.random.default_rng(1).standard_normal((1, 2, 5, 10)).astype(np.float32)
    for interleaved_rope in (True, False):
        turned = rotate(Tensor(x), np.arange(5), rotary_frequencies(3), interleaved_rope).data
        np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])
        np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "interleaved_rope"), SHAPES)
def test_the_cache_changes_no_token(heads: int, kv_heads: int, interleaved_rope: bool) -> None:
    model = Llama(config(heads, kv_heads, interleaved_rope), rng=1)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8]]
    together = np.array(list(generate(model, prompts, 20)))
    for i, prompt in enumerate(prompts):
        assert list(generate(model, prompt, 20, use_cache=False)) == list(together[:, i])


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
@pytest.mark.parametrize("head_dim", [0, 10])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_the_decoder_gives_the_logits_of_the_layers(isa: str, head_dim: int) -> None:
    assert native is not None
    if isa not in native.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    model = Llama(config(6, 2, head_dim=head_dim, frequencies=rotary_frequencies(3)), rng=1)
    rows = np.stack([np.arange(9), np.zeros(9, int), np.arange(9)], 1)
    before = native.isa()
    native.set_isa(isa)
    try:
        found = make_engine(model).run(rows, new_cache(model, 1), np.arange(9))
    finally:
        native.set_isa(before)
    expected = ModelEngine(model).run(rows, new_cache(model, 1), np.arange(9))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 0.03), ("int4", 0.3)])
def test_integer_weights_decode_close_to_float(weights: str, tolerance: float) -> None:
    model = Llama(config(), rng=1)
    rows = np.stack([np.arange(9), np.zeros(9, int), np.arange(9)], 1)
    a, b = (make_engine(model, kind).run(rows, new_cache(model, 1), np.arange(9)) for kind in ("float32", weights))
    assert np.abs(a - b).max() < tolerance * np.abs(a).max()


def test_impossible_sizes_are_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="share"):
        config(4, 3)
    with pytest.raises(ConfigurationError, match="cannot be divided"):
        config(5, 1)
    with pytest.raises(ConfigurationError, match="rotary pairs"):
        config(4, 4, frequencies=rotary_frequencies(7))
    with pytest.raises(ShapeError, match="context"):
        Llama(config(context=4), rng=0)(np.zeros((1, 5), int))


def test_layers_come_from_the_factory_that_is_given() -> None:
    names: list[str] = []

    def layer(name: str, inputs: int, outputs: int, bias: bool) -> Linear:
        names.append(name)
        return nn.Linear(inputs, outputs, bias)

    Llama(config(layers=1), layer=layer)
    assert names[0] == "blocks.0.self_attn.q_proj"
    assert names[-1] == "head"
    assert len(names) == 8
