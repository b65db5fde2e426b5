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
from tilewise.nn.decoder_config import rotary_frequencies
from tilewise.nn.llama import rotate

SHAPES = [(4, 4, True), (4, 2, False), (6, 1, True)]  # heads, heads with keys, pairs side by side


def config(heads: int = 4, kv_heads: int = 2, interleaved_rope: bool = True, **more: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {"layers": 2, "width": 48, "hidden": 80, "vocab": 31, "context": 64}
    return LlamaConfig(heads=heads, kv_heads=kv_heads, interleaved_rope=interleaved_rope, **(sizes | more))


def torch_rotate(x: torch.Tensor, frequencies: np.ndarray, interleaved_rope: bool) -> torch.Tensor:
    """As complex numbers: another way than ours."""
    pairs = len(frequencies)
    halves = x.unflatten(-1, (pairs, 2)) if interleaved_rope else x.unflatten(-1, (2, pairs)).transpose(-1, -2)
    angles = torch.outer(torch.arange(x.shape[-2]).double(), torch.from_numpy(frequencies).double())
    rotated = torch.view_as_real(
        torch.view_as_complex(halves.double().contiguous()) * torch.polar(torch.ones(()).double(), angles)
    )
    return (rotated if interleaved_rope else rotated.transpose(-1, -2)).flatten(-2).to(x.dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "gemma2": {
        "post_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": 7.0,
        "windows": (3, 0),
        "attention_cap": 2.0,
        "logit_cap": 1.5,
        "attention_scale": 0.4,
    },
    "gemma3": {
        "post_norms": True,
        "qk_norm": True,
        "activation": "gelu_tanh",
        "windows": (4, 0),
        "window_frequencies": rotary_frequencies(6, 100.0),
    },
    "phi3": {"rotary_magnitude": 1.2, "long_frequencies": rotary_frequencies(6, 50.0), "long_context": 5},
    "gpt2": {
        "norm": "layer",
        "gated": False,
        "activation": "gelu_tanh",
        "learned_positions": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
}


def torch_norm(c: LlamaConfig, p: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """The norm of this name; without one the values as they are."""
    if f"{name}.weight" not in p:
        return x
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    if bias is not None:
        return tf.layer_norm(x, weight.shape, weight, bias, c.eps)
    return tf.rms_norm(x, weight.shape, weight, c.eps)


def torch_attention(c: LlamaConfig, p: dict[str, torch.Tensor], layer: int, h: torch.Tensor) -> torch.Tensor:
    """Attention written with a matrix of all scores."""
    names = [f"self_attn.{name}_proj" for name in "qkv"]
    q, k, v = (
        tf.linear(h, p[f"{n}.weight"], p.get(f"{n}.bias")).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        for n in names
    )
    q, k = torch_norm(c, p, "self_attn.q_norm", q), torch_norm(c, p, "self_attn.k_norm", k)
    length, window = h.shape[1], c.windows[layer]
    frequencies = c.frequencies
    if window and c.window_frequencies is not None:
        frequencies = c.window_frequencies
    elif c.long_frequencies is not None and length > c.long_context:
        frequencies = c.long_frequencies
    if len(frequencies):
        q, k = (torch_rotate(each, frequencies, c.interleaved_rope) * c.rotary_magnitude for each in (q, k))
    k, v = (each.repeat_interleave(c.heads // c.kv_heads, 1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) * c.attention_scale
    if c.attention_cap:
        scores = c.attention_cap * torch.tanh(scores / c.attention_cap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or length)), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return tf.linear(mixed, p["self_attn.o_proj.weight"], p.get("self_attn.o_proj.bias"))


def torch_model(model: Llama, ids: np.ndarray, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    c = model.config
    x = parameters["token_embedding.weight"][torch.from_numpy(ids)] * c.embedding_scale
    if c.learned_positions:
        x = x + parameters["position_embedding.weight"][: ids.shape[1]]
    act = tf.silu if c.activation == "silu" else lambda h: tf.gelu(h, approximate="tanh")
    for i in range(c.layers):
        p = {name.removeprefix(f"blocks.{i}."): value for name, value in parameters.items()}
        added = torch_attention(c, p, i, torch_norm(c, p, "norm1", x))
        x = x + torch_norm(c, p, "post_norm1", added)
        h = torch_norm(c, p, "norm2", x)
        names = ("gate", "up") if c.gated else ("up",)
        parts = [tf.linear(h, p[f"mlp.{n}_proj.weight"], p.get(f"mlp.{n}_proj.bias")) for n in names]
        widened = act(parts[0]) * (parts[1] if c.gated else 1)
        added = tf.linear(widened, p["mlp.down_proj.weight"], p.get("mlp.down_proj.bias"))
        x = x + torch_norm(c, p, "post_norm2", added)
    p = {name: value for name, value in parameters.items() if not name.startswith("blocks")}
    logits = tf.linear(torch_norm(c, p, "norm", x), p["head.weight"])
    return c.logit_cap * torch.tanh(logits / c.logit_cap) if c.logit_cap else logits


def random_model(options: dict[str, Any], seed: int = 1) -> Llama:
    """A model whose norms and biases are not the initial ones."""
    model, rng = Llama(config(**options), rng=seed), np.random.default_rng(seed)
    for name, tensor in model.named_tensors():
        if "norm" in name or name.endswith("bias"):
            tensor.data[...] = rng.uniform(0.5, 1.5, tensor.shape)
    return model


CASES = [{"heads": h, "kv_heads": k, "interleaved_rope": i, "qkv_bias": b} for h, k, i in SHAPES for b in (False, True)]


@pytest.mark.parametrize("options", [*CASES, *OPTIONS.values()])
def test_logits_and_all_gradients_are_pytorchs(options: dict[str, Any]) -> None:
    model, rng = random_model(options), np.random.default_rng(0)
    ids, weigh = rng.integers(0, 31, (2, 7)), rng.standard_normal((2, 7, 31)).astype(np.float32)
    theirs = {name: torch.tensor(t.data, requires_grad=True) for name, t in model.named_tensors()}
    expected = torch_model(model, ids, theirs)
    result = model(ids)
    np.testing.assert_allclose(result.data, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    (result * weigh).sum().backward()
    (expected * torch.from_numpy(weigh)).sum().backward()
    for name, tensor in model.named_tensors():
        gradient = theirs[name].grad
        assert gradient is not None
        assert tensor.grad is not None, name
        np.testing.assert_allclose(np.asarray(tensor.grad), gradient.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


def test_rotary_positions_leave_the_rest_of_a_head_alone() -> None:
    x = np.random.default_rng(1).standard_normal((1, 2, 5, 10)).astype(np.float32)
    for interleaved_rope in (True, False):
        ours = rotate(Tensor(x), np.arange(5), rotary_frequencies(3), interleaved_rope).data
        np.testing.assert_array_equal(ours[..., 6:], x[..., 6:])
        np.testing.assert_allclose(np.linalg.norm(ours, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("options", [*CASES[::2], *(OPTIONS[name] for name in OPTIONS if name != "phi3")])
def test_the_cache_changes_no_token(options: dict[str, Any]) -> None:
    model = random_model(options)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8]]
    together = np.array(list(generate(model, prompts, 20)))
    for i, prompt in enumerate(prompts):
        assert list(generate(model, prompt, 20, use_cache=False)) == list(together[:, i])


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
@pytest.mark.parametrize("options", [{"heads": 6}, {"heads": 6, "head_dim": 10}, *OPTIONS.values()])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_the_decoder_gives_the_logits_of_the_layers(isa: str, options: dict[str, Any]) -> None:
    assert native is not None
    if isa not in native.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    model = random_model(options if "heads" not in options else options | {"frequencies": rotary_frequencies(3)})
    rows = np.stack([np.arange(9), np.zeros(9, int), np.arange(9)], 1)
    before = native.isa()
    native.set_isa(isa)
    try:
        logits = make_engine(model).run(rows, new_cache(model, 1), np.arange(9))
    finally:
        native.set_isa(before)
    expected = ModelEngine(model).run(rows, new_cache(model, 1), np.arange(9))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
def test_a_window_limits_prompts_and_tokens_alike(cache_dtype: str) -> None:
    model = random_model(OPTIONS["gemma2"] | {"windows": (5, 9)})
    prompt = np.random.default_rng(0).integers(0, 31, 30)
    rows = np.stack([prompt, np.zeros(30, int), np.arange(30)], 1)
    together = make_engine(model).run(rows, new_cache(model, 1, dtype=cache_dtype), np.arange(30))
    cache = new_cache(model, 1, dtype=cache_dtype)
    singly = np.concatenate([make_engine(model).run(row[None], cache, np.arange(1)) for row in rows])
    np.testing.assert_allclose(together, singly, rtol=1e-4, atol=1e-5)


def test_long_caches_use_the_long_frequencies() -> None:
    model = random_model(OPTIONS["phi3"])
    short, long = (list(generate(model, [1, 2], 3, cache=new_cache(model, 1, n))) for n in (5, 6))
    plain = random_model({name: value for name, value in OPTIONS["phi3"].items() if "long" not in name})
    assert short == list(generate(plain, [1, 2], 3))
    rows = np.stack([np.arange(4), np.zeros(4, int), np.arange(4)], 1)
    a, b = (ModelEngine(model).run(rows, new_cache(model, 1, n), np.arange(4)) for n in (5, 6))
    assert np.abs(a - b).max() > 1e-3
    np.testing.assert_allclose(
        make_engine(model).run(rows, new_cache(model, 1, 6), np.arange(4)), b, rtol=1e-4, atol=1e-5
    )
    assert len(long) == 3


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
    with pytest.raises(ConfigurationError, match="windows"):
        config(windows=(1, 2, 3))
    with pytest.raises(ConfigurationError, match="gate"):
        config(activation="gelu")
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
