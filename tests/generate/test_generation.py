"""Generation with the cache gives the tokens and logits of generation without it, and of PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewise import models, no_grad
from tilewise._extension import native
from tilewise.errors import ConfigurationError, FileFormatError, ShapeError
from tilewise.generate import KVCache, generate, load_gpt2, make_engine, new_cache
from tilewise.generate.engine import ModelEngine
from tilewise.io import save
from tilewise.nn import GPT

RNG = np.random.default_rng(0)
SMALL = GPT(2, 48, 3, vocab=31, context=40, rng=3)


def engines() -> list[object]:
    return [ModelEngine(SMALL)] + ([make_engine(SMALL)] if native is not None else [])


def full_logits(model: GPT, tokens: np.ndarray) -> np.ndarray:
    with no_grad():
        out: np.ndarray = model(tokens[None]).data[0]
    return out


@pytest.mark.parametrize("engine", engines(), ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("lengths", [[7], [1, 9, 4], [5, 5]])
def test_cached_logits_equal_uncached_ones(engine, lengths: list[int], backend: str) -> None:
    prompts = [RNG.integers(0, 31, n) for n in lengths]
    cache = new_cache(SMALL, len(prompts))
    sequence, position = np.repeat(np.arange(len(prompts)), lengths), np.concatenate([np.arange(n) for n in lengths])
    rows = np.stack([np.concatenate(prompts), sequence, position], 1)
    logits = engine.run(rows, cache, np.arange(len(rows)))
    expected = np.concatenate([full_logits(SMALL, p) for p in prompts])
    assert np.abs(logits - expected).max() <= 1e-5 * max(1, np.abs(expected).max())
    for _ in range(10):
        new = RNG.integers(0, 31, len(prompts))
        rows = np.stack([new, np.arange(len(prompts)), [len(p) for p in prompts]], 1)
        prompts = [np.append(p, t) for p, t in zip(prompts, new, strict=True)]
        logits = engine.run(rows, cache, np.arange(len(prompts)))
        expected = np.stack([full_logits(SMALL, p)[-1] for p in prompts])
        assert np.abs(logits - expected).max() <= 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("size", ["4x128", "6x384"])
def test_greedy_tokens_are_those_of_generation_without_a_cache(size: str) -> None:
    model = models.gpt(size, seed=5)
    prompt = RNG.integers(0, 65, 12)
    count = 60 if size == "4x128" else 20
    assert list(generate(model, prompt, count)) == list(generate(model, prompt, count, use_cache=False))


def test_a_ragged_batch_gives_what_each_prompt_gives_alone() -> None:
    prompts = [RNG.integers(0, 31, n) for n in (3, 11, 1)]
    together = np.stack(list(generate(SMALL, prompts, 20)), 1)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert list(generate(SMALL, prompt, 20, use_cache=False)) == list(tokens)


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_a_smaller_cache_changes_logits_little(kind: str) -> None:
    if native is None:
        pytest.skip("the compiled kernels are not built")
    tokens = RNG.integers(0, 31, 30)
    rows = np.stack([tokens, np.zeros(30, int), np.arange(30)], 1)
    expected = full_logits(SMALL, tokens)
    for engine in engines():
        logits = engine.run(rows, new_cache(SMALL, 1, dtype=kind), np.arange(30))
        assert np.abs(logits - expected).max() <= 0.03 * np.abs(expected).max()


def test_int8_weights_change_logits_little_and_stop_no_earlier() -> None:
    if native is None:
        pytest.skip("the compiled kernels are not built")
    tokens = RNG.integers(0, 31, 30)
    rows = np.stack([tokens, np.zeros(30, int), np.arange(30)], 1)
    logits = make_engine(SMALL, "int8").run(rows, new_cache(SMALL, 1), np.arange(30))
    expected = full_logits(SMALL, tokens)
    assert np.abs(logits - expected).max() <= 0.05 * np.abs(expected).max()
    assert len(list(generate(SMALL, tokens[:4], 20, weights="int8"))) == 20


def test_a_stop_token_ends_a_sequence_and_then_the_batch() -> None:
    alone = list(generate(SMALL, [1, 2], 30))
    stop = alone[4]
    stopped = list(generate(SMALL, [1, 2], 30, stop=stop))
    assert stopped == alone[: alone.index(stop) + 1]
    batch = np.stack(list(generate(SMALL, [[1, 2], [3]], 30, stop=[stop])))
    first = batch[:, 0]
    end = list(first).index(stop)
    assert (first[end + 1 :] == -1).all()


def test_sampling_is_fixed_by_its_seed_and_keeps_to_top_k() -> None:
    draw = lambda seed, **kw: list(generate(SMALL, [1], 25, temperature=1.3, seed=seed, **kw))  # noqa: E731
    assert draw(1) == draw(1) != draw(2)
    assert draw(1, top_k=1) == list(generate(SMALL, [1], 25))
    assert draw(1, top_p=1e-9) == list(generate(SMALL, [1], 25))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [99]}, "token 99 is outside"),
        ({"prompt": [-1]}, "token -1 is outside"),
        ({"prompt": [1] * 41}, "longer than the model's context of 40"),
        ({"prompt": [1], "max_new_tokens": 41}, "do not fit"),
        ({"prompt": [1], "temperature": -1.0}, "temperature"),
        ({"prompt": [1], "top_k": 0}, "top_k"),
        ({"prompt": [1], "top_p": 0.0}, "top_p"),
        ({"prompt": [1.5]}, "integers"),
        ({"prompt": "abc"}, "encode the text"),
        ({"prompt": [1], "weights": "int2"}, "float32"),
        ({"prompt": [1], "cache": KVCache(40, 3, 16)}, r"need a cache of"),
        (
            {"prompt": [1], "max_new_tokens": 9, "cache": KVCache(8, 3, 16, n_layers=2, batch_size=1)},
            "need 9 positions",
        ),
        ({"prompt": [1], "cache": "yes"}, "must be a KVCache"),
        ({"prompt": [1], "cache": new_cache(SMALL, 1), "use_cache": False}, "needs use_cache=True"),
        ({"prompt": None}, "sequence of token ids"),
        ({"prompt": [[[1]]]}, "one row of token ids"),
        ({"prompt": [1], "max_new_tokens": 2.5}, "max_new_tokens must be an integer"),
        ({"prompt": [1], "seed": -1}, "seed must be"),
        ({"prompt": [1], "stop": "a"}, "stop must be a token id"),
        ({"prompt": [1], "temperature": "hot"}, "temperature must be"),
        ({"prompt": [1], "top_k": 2.5}, "top_k must be"),
    ],
)
def test_bad_requests_get_a_sentence_before_anything_runs(arguments: dict, sentence: str) -> None:
    with pytest.raises((ShapeError, ConfigurationError), match=sentence):
        generate(SMALL, **{"max_new_tokens": 3, **arguments})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_model_that_gives_nan_says_so(temperature: float, use_cache: bool) -> None:
    broken = GPT(1, 16, 1, vocab=5, context=8)
    broken.norm.weight.data[0] = np.nan
    with pytest.raises(ConfigurationError, match="logits are NaN"):
        list(generate(broken, [1], 2, temperature=temperature, use_cache=use_cache))


def test_something_else_than_a_gpt_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a tilewise\.nn\.GPT"):
        generate(models.mlp(), [1], 2)


def test_generating_again_and_again_keeps_no_memory() -> None:
    if native is None:
        pytest.skip("the compiled kernels are not built")
    for weights in ("float32", "int8"):
        list(generate(SMALL, [1], 2, weights=weights))
        before = native.memory_in_use()
        for _ in range(1000):
            list(generate(SMALL, [1], 2, weights=weights))
        assert native.memory_in_use() == before


class TorchGPT2(torch.nn.Module):
    """GPT-2's definition, written in PyTorch, with its public parameter names."""

    def __init__(self, vocab: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        shapes = {"wte.weight": (vocab, width), "wpe.weight": (context, width), "ln_f.weight": (width,)}
        shapes["ln_f.bias"] = (width,)
        for i in range(layers):
            for name, shape in {
                "ln_1.weight": (width,),
                "ln_1.bias": (width,),
                "ln_2.weight": (width,),
                "ln_2.bias": (width,),
                "attn.c_attn.weight": (width, 3 * width),
                "attn.c_attn.bias": (3 * width,),
                "attn.c_proj.weight": (width, width),
                "attn.c_proj.bias": (width,),
                "mlp.c_fc.weight": (width, 4 * width),
                "mlp.c_fc.bias": (4 * width,),
                "mlp.c_proj.weight": (4 * width, width),
                "mlp.c_proj.bias": (width,),
            }.items():
                shapes[f"h.{i}.{name}"] = shape
        torch.manual_seed(0)
        self.p = {name: torch.randn(shape) * 0.1 + (0.9 if "ln" in name else 0) for name, shape in shapes.items()}
        self.layers = layers

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        f, p = torch.nn.functional, self.p
        b, t = ids.shape
        x = p["wte.weight"][ids] + p["wpe.weight"][:t]
        width = x.shape[-1]
        norm = lambda x, n: f.layer_norm(x, (width,), p[n + ".weight"], p[n + ".bias"])  # noqa: E731
        for i in range(self.layers):
            h = f"h.{i}."
            qkv = norm(x, h + "ln_1") @ p[h + "attn.c_attn.weight"] + p[h + "attn.c_attn.bias"]
            q, k, v = (m.view(b, t, self.heads, -1).transpose(1, 2) for m in qkv.split(width, -1))
            mixed = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, width)
            x = x + mixed @ p[h + "attn.c_proj.weight"] + p[h + "attn.c_proj.bias"]
            up = norm(x, h + "ln_2") @ p[h + "mlp.c_fc.weight"] + p[h + "mlp.c_fc.bias"]
            x = x + f.gelu(up, approximate="tanh") @ p[h + "mlp.c_proj.weight"] + p[h + "mlp.c_proj.bias"]
        return norm(x, "ln_f") @ p["wte.weight"].T


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_a_gpt2_file_gives_the_logits_of_gpt2s_definition(tmp_path, prefix: str) -> None:
    reference = TorchGPT2(50, 32, 128, 2, 2)
    tensors = {prefix + name: value.numpy() for name, value in reference.p.items()}
    tensors[prefix + "h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
    save(tensors, tmp_path / "model.safetensors")
    model = load_gpt2(tmp_path / "model.safetensors")
    ids = RNG.integers(0, 50, (1, 20))
    expected = reference(torch.from_numpy(ids)).detach().numpy()[0]
    with no_grad():
        plain = model(ids).data[0]
    rows = np.stack([ids[0], np.zeros(20, int), np.arange(20)], 1)
    cached = make_engine(model).run(rows, new_cache(model, 1), np.arange(20))
    for logits in (plain, cached):
        assert np.abs(logits - expected).max() <= 1e-4 * max(1, np.abs(expected).max())


def test_a_file_that_is_no_gpt2_gets_a_sentence(tmp_path) -> None:
    save({"something": np.zeros(3, np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(FileFormatError, match="not a GPT-2 file"):
        load_gpt2(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda t: t.pop("h.1.mlp.c_fc.bias"), "lacks blocks.1.linear1.bias"),
        (lambda t: t.update({"h.0.attn.c_attn.weight": np.zeros((128, 100), np.float32)}), r"has shape \(100, 128\)"),
        (lambda t: t.update({"wte.weight": np.zeros((50, 0), np.float32)}), "complete GPT"),
        (lambda t: [t.pop(name) for name in list(t) if name.startswith("h.")], "0 layers"),
    ],
)
def test_a_damaged_gpt2_file_gets_a_sentence_that_names_it(tmp_path, damage, sentence: str) -> None:
    tensors = {name: value.numpy() for name, value in TorchGPT2(50, 32, 128, 2, 2).p.items()}
    damage(tensors)
    save(tensors, tmp_path / "mine.safetensors")
    with pytest.raises(FileFormatError, match=rf"mine\.safetensors .*{sentence}"):
        load_gpt2(tmp_path / "mine.safetensors")


def test_a_gpt2_file_cut_short_gets_a_sentence(tmp_path) -> None:
    tensors = {name: value.numpy() for name, value in TorchGPT2(50, 32, 128, 2, 2).p.items()}
    save(tensors, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    for size in (0, 7, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.safetensors").write_bytes(content[:size])
        with pytest.raises(FileFormatError, match="cut"):
            load_gpt2(tmp_path / "cut.safetensors")


@pytest.mark.parametrize("native_engine", [True, False])
def test_a_conversation_continues_in_its_cache(native_engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.gpt("4x128")
    if not native_engine:
        monkeypatch.setattr("tilewise.generate.engine.native", None)
    cache = new_cache(model, 1, 64)
    first = list(generate(model, [1, 2, 3], 5, cache=cache))
    longer = [1, 2, 3, *first, 7, 8]
    assert list(generate(model, longer, 5, cache=cache, cached_tokens=7)) == list(generate(model, longer, 5))
    shorter = [1, 2, 9]
    assert list(generate(model, shorter, 5, cache=cache, cached_tokens=2)) == list(generate(model, shorter, 5))
    for tokens, prompt in ((3, shorter), (60, list(range(61)))):
        with pytest.raises(ShapeError, match="does not hold"):
            generate(model, prompt, 1, cache=cache, cached_tokens=tokens)
