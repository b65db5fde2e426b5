"""Calls as people type them from the teaching plan: each works, or fails with one sentence that says what to do."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import tilewise.backend
import tilewise.bench
import tilewise.generate
import tilewise.profile
import tilewise.prune
import tilewise.quantize
from tilewise import Tensor, data, load_model, models, nn, optim, save
from tilewise._extension import native
from tilewise.costmodel import rank
from tilewise.errors import TilewiseError

WORKING = """
matmul_naive(a, b)
matmul_naive(Tensor(a), Tensor(b))
matmul_blocked(a, b)
matmul_blocked(a, b, 16)
matmul_blocked(a, b, block_size=16)
matmul_numpy(a, b)
matmul_numpy(a.tolist(), b.tolist())
OptimizedBackend().dispatch("matmul", a, b)
OptimizedBackend().dispatch("conv2d", images, conv.weight.data)
INT8Quantizer().quantize_weights(weights)
INT8Quantizer().quantize_weights(weights=weights, calibration_data=rows)
INT8Quantizer().quantize_weights(linear.weight)
INT8Quantizer().dequantize(INT8Quantizer().quantize_weights(weights))
calibrate(cnn, digits.x_train[:64])
calibrate(cnn, Tensor(digits.x_train[:8]))
calibrate(cnn, [digits.x_train[:8]])
calibrate(mlp, digits.flat().x_train[:8])
quantize(mlp, digits.flat().x_train[:64])
QuantizedConv2d(3, 8, 3)(images)
QuantizedConv2d(in_channels=3, out_channels=8, kernel_size=3, stride=1, padding=1)(Tensor(images))
QuantizedConv2d.from_float(conv)(images)
QuantizedLinear(128, 64)(rows)
QuantizedLinear(in_features=128, out_features=64, bias=False)(rows)
QuantizedLinear.from_float(linear)(rows)
MagnitudePruner().prune(weights, sparsity=0.7)
MagnitudePruner(sparsity=0.7).prune(weights)
MagnitudePruner().prune(linear.weight, 0.7)
prune_conv_filters(conv, sparsity=0.5)
prune_conv_filters(conv_layer=conv)
SparseLinear(128, 64)(rows)
SparseLinear(in_features=128, out_features=64, bias=True)
SparseLinear.from_dense(linear)(rows)
SparseLinear.from_float(linear)(rows)
SparseConv2d(3, 8, 3, padding=1)(images)
KVCache(max_seq_len=128, n_heads=4, head_dim=8)
KVCache(8, 4, 8).update(layer=0, key=Tensor(key), value=Tensor(value), position=3)
cache.get(0, 3)
cache.get(0)
cache.get(layer=0, positions=range(3))
CachedAttention(embed_dim=32, num_heads=4).forward(words)
CachedAttention(32, 4).forward(words, past_kv=KVCache(64, 4, 8))
CachedAttention(32, 4).forward(np.asarray(words), past_kv=None)
CachedAttention(32, 4)(words, KVCache(64, 4, 8).layer(0))
list(generate(gpt, prompt, max_new_tokens=2, use_cache=True))
Timer(sample_seconds=1e-5).measure(lambda: a @ b, warmup=3, runs=5)
MemoryProfiler().profile(lambda: a @ b)
FLOPCounter().count_ops(mlp, digits.flat().x_test[:1])
ProfilerContext()
benchmark_model(TinyMLPerf.MLP_SPRINT, timer, training=False)
benchmark_model("mlp", timer, training=False)
TinyMLPerf().MLP_SPRINT
TinyMLPerf["MLP_SPRINT"]
compute_speedup(2.0, 1.0)
compute_speedup(baseline=2.0, optimized=1.0)
compute_speedup(timing, timing)
CompetitionSubmission(event="MLP_SPRINT", recipe=reference_recipe("MLP_SPRINT"), team="owls")
load_model("mlp")
load_model(mlp_file)
matmul_naive([[1, 2], [3, 4]], [[5, 6], [7, 8]])
matmul_naive(torch.ones(4, 4), torch.ones(4, 4))
matmul_naive(np.zeros((0, 4)), np.zeros((4, 0)))
matmul_blocked(a.astype(int), b.astype(int), 8)
OptimizedBackend().dispatch(op="matmul", a=a, b=b)
INT8Quantizer().quantize_weights(weights.tolist())
INT8Quantizer().quantize_weights(torch.ones(8, 8))
calibrate(cnn, torch.ones(4, 1, 8, 8))
calibrate(model=cnn, calibration_dataset=[torch.ones(4, 1, 8, 8)])
QuantizedConv2d(3, 8, kernel_size=(3, 3))(images)
QuantizedLinear(128, 64)(rows[0])
QuantizedLinear(128, 64)(torch.ones(4, 128))
MagnitudePruner().prune([1.0, -2.0, 3.0], 0.5)
MagnitudePruner().prune(torch.ones(4, 4), 0.5)
MagnitudePruner().prune(np.float32(3), 0.5)
MagnitudePruner().prune(np.zeros((0,)), 0.5)
SparseLinear(128, 64, sparsity=0.7)
SparseLinear.from_dense(linear)(rows[0])
SparseLinear(128, 64)([[1.0] * 128])
KVCache(8, 4, 8).update(0, torch.ones(1, 4, 3, 8), torch.ones(1, 4, 3, 8), 0)
cache.get(0, [0, 2])
CachedAttention(32, 4).forward(torch.ones(1, 6, 32))
list(generate(gpt, [1, 2, 3], 2))
list(generate(gpt, torch.tensor([1, 2]), 2))
FLOPCounter().count_ops(mlp, [[0.0] * 64])
compute_speedup(2, 1)
compute_speedup(np.float64(2), np.float64(1))
matmul_naive(a=a, b=b)
matmul_native(a, b)
matmul_numpy(Tensor(a), b)
OptimizedBackend().dispatch("relu", a)
INT8Quantizer().quantize_weights(weights, [rows])
INT8Quantizer().quantize_weights(weights, calibration_data=[rows, rows]).q.dtype
calibrate(cnn, iter([digits.x_train[:8]]))
quantize(cnn, [Tensor(digits.x_train[:8])])
quantize(gpt, [prompt[None]])
QuantizedConv2d(3, 8, 3, stride=2, padding=1, bias=False)(images)
MagnitudePruner("2:4").prune(weights)
prune_conv_filters(conv, sparsity=0)
shrink(cnn)
cache.get(layer=0, positions=slice(0, 2))
cache.get(0, np.arange(3))
list(generate(gpt, prompt, 0))
list(generate(gpt, prompt, 2, temperature=0.8, top_k=5))
Timer(sample_seconds=1e-5).measure(func=lambda: a @ b, warmup=0, runs=3).p99
FLOPCounter().count_ops(gpt, prompt[None])
load_model("cnn")(digits.x_test[:2])
OptimizedBackend().dispatch("conv2d", images, conv.weight)
OptimizedBackend().dispatch("relu", Tensor(a))
INT8Quantizer().quantize_weights(torch.nn.Linear(4, 4).weight)
TinyMLPerf["mlp_sprint"]
TinyMLPerf.event("Cnn Marathon")
benchmark_model("mlp_sprint", timer, training=False)
CompetitionSubmission("mlp_sprint", reference_recipe("mlp_sprint"), "owls")
nn.functional.relu(a)
nn.functional.softmax(a.tolist())
nn.functional.cross_entropy(a, [0] * 24)
quantize(gpt, prompt[None], bits=4)
quantize(cnn, digits.x_train[:8], bits=4)
"""
EXPLAINED = {
    "matmul_naive(a, b[:5])": "cannot be multiplied",
    "OptimizedBackend().dispatch(matmul_numpy, a, b)": "did you mean 'matmul'",
    "INT8Quantizer().quantize_weights(linear)": "pass layer.weight",
    "calibrate(cnn, digits)": "pass its x_train",
    "calibrate(cnn, [(digits.x_train[:8], digits.y_train[:8])])": "has no labels",
    "quantize(cnn)": "there is no calibration data",
    "QuantizedConv2d(conv)": "QuantizedConv2d.from_float",
    "QuantizedLinear(linear)": "QuantizedLinear.from_float",
    "MagnitudePruner().prune(cnn, 0.7)": "prune(model, sparsity)",
    "MagnitudePruner().prune(weights, sparsity=70)": "between 0 and 1",
    "prune_conv_filters(linear, 0.5)": "from an nn.Conv2d, not from a Linear",
    "SparseLinear(linear)": "SparseLinear.from_dense",
    "SparseLinear(weights)": "SparseLinear.from_weights",
    "SparseLinear.from_dense(conv)": "takes an nn.Linear, not a Conv2d",
    "CachedAttention(32, 4).forward(words, past_kv=(key, value))": "must be a KVCache",
    "CachedAttention(32, 4).forward(words, past_kv=KVCache(8, 4, 8, n_layers=2))": "cache.layer(i)",
    "list(generate(gpt, 'import', 4))": "data.encode(text)",
    "Timer().measure(a @ b)": "needs a function",
    "MemoryProfiler().profile(a @ b)": "needs a function",
    "FLOPCounter().count_ops(mlp, (1, 64))": "np.zeros((1, 64))",
    "benchmark_model(TinyMLPerf.TILE_OLYMPIAD)": "no model to time",
    "benchmark_model(mlp, 'profiler')": "must be a Timer",
    "compute_speedup(2.0, 0.0)": "positive seconds",
    "compute_speedup(2.0, mlp)": "not one of each",
    "CompetitionSubmission(TinyMLPerf.MLP_SPRINT, mlp, 'owls')": "reference_recipe(event)",
    "load_model('model.pkl')": "can run any program",
    "load_model('resnet50')": "there is no model",
    "matmul_naive(a, 3)": "shapes (24, 24) and ()",
    "matmul_naive(a[None], b[None])": "cannot be multiplied",
    "matmul_blocked(a, b, block_size=8.0)": "a positive size",
    "matmul_numpy('a', 'b')": "not two matrices",
    "INT8Quantizer().quantize_weights(np.float32(3))": "they have no elements",
    "INT8Quantizer().quantize_weights(weights.astype(np.int32))": "floating-point numbers, not int32",
    "INT8Quantizer().quantize_weights(None)": "an array of floating-point numbers",
    "INT8Quantizer().quantize_weights(weights, digits)": "not ImageData",
    "calibrate(digits.x_train[:8], cnn)": "an nn.Module, not numpy.ndarray",
    "quantize('cnn', digits.x_train[:64])": "an nn.Module, not str",
    "QuantizedConv2d(3, 8, 3)(rows)": "four dimensions",
    "QuantizedLinear(128)": "the sizes of a new layer",
    "QuantizedLinear(128, 64)(rows[:, :5])": "takes (..., 128)",
    "MagnitudePruner(0.7).prune(weights)": "sparsity has a keyword",
    "MagnitudePruner().prune(weights, sparsity='70%')": "between 0 and 1",
    "prune_conv_filters(torch.nn.Conv2d(3, 8, 3), 0.5)": "not from a torch.Conv2d",
    "prune_conv_filters(conv, 1.0)": "would lose them all",
    "prune(weights, 0.7)": "for arrays use MagnitudePruner",
    "SparseLinear.from_dense(linear, 0.7)": "use MagnitudePruner first",
    "SparseLinear.from_dense(torch.nn.Linear(8, 4))": "not a torch.Linear",
    "KVCache(8.0, 4, 8)": "positive integer, not 8.0",
    "KVCache(8, 4, 8).update(0, key[0], value[0], 0)": "must be (batch, 4, positions, 8)",
    "KVCache(8, 4, 8).get(0)": "nothing is stored for layer 0",
    "cache.get(0, 'all')": "a length, a slice or a row",
    "CachedAttention(32, 5)": "divided among 5 heads",
    "CachedAttention(32, 4).forward(words, past_kv=KVCache(4, 4, 8))": "make it larger",
    "list(generate(gpt, [], 2))": "at least one token id",
    "list(generate(mlp, prompt, 2))": "not a Sequential",
    "Timer().measure(np.sum, a, runs=3)": "warmup must be an integer of at least 0, not a numpy.ndarray",
    "Timer().measure(lambda x: x, runs=3)": "missing 1 required positional argument",
    "FLOPCounter().count_ops(torch.nn.Linear(4, 4), rows)": "not torch.Linear",
    "FLOPCounter().count_ops(mlp, digits.x_test[:1])": "cannot take an input of shape",
    "benchmark_model(torch.nn.Linear(4, 4), timer)": "not a torch.Linear",
    "compute_speedup(float('nan'), 1.0)": "positive seconds",
    "load_model(mlp)": "the name of a model or of a file",
    "load_model('')": "the name of a model or of a file",
    "matmul_native(a.astype(np.float64), b)": "a is dtype('float64')",
    "matmul_blocked(a, b, 0)": "a positive size",
    "calibrate(cnn, [])": "at least one input",
    "quantize(cnn, digits.flat().x_train[:8])": "four dimensions",
    "QuantizedConv2d.from_float(linear)": "takes an nn.Conv2d, not a Linear",
    "MagnitudePruner(pattern='2:4').prune(weights[:, :6])": "groups of 4",
    "prune_conv_filters(cnn, 0.5)": "not from a Sequential",
    "prune(cnn, 0.7, scope='layers')": "'global' or 'layer' or 'row'",
    "prune('cnn', 0.7)": "an nn.Module, not str",
    "shrink(gpt, 0.5)": "not GPT",
    "KVCache(8, 4, 8).update(0, key, value, 6)": "make it larger",
    "KVCache(8, 4, 8).update(key, value, 0, 0)": "an array of shape (1, 4, 3, 8)",
    "cache.get(0, 99)": "the cache has 3",
    "CachedAttention(32, 4).forward(words.data[0])": "takes (B, T, 32)",
    "list(generate(gpt, prompt, max_new_tokens=-1))": "at least 0, not -1",
    "list(generate(gpt, [999999], 2))": "vocabulary of 96",
    "Timer().measure(lambda: 1 / 0, runs=3)": "raised ZeroDivisionError",
    "MemoryProfiler().profile(cnn)": "missing 1 required positional argument",
    "benchmark_model(TinyMLPerf.MLP_SPRINT, Timer)": "not a class Timer",
    "CompetitionSubmission(TinyMLPerf.CNN_MARATHON, reference_recipe('MLP_SPRINT'), 'owls')": "not for CNN_MARATHON",
    'OptimizedBackend.dispatch("matmul", a, b)': "belongs to an instance: make one first",
    "INT8Quantizer.quantize_weights(weights)": "belongs to an instance",
    "Timer.measure(func=lambda: a @ b)": "belongs to an instance",
    "KVCache.update(0, key, value, 0)": "belongs to an instance",
    "FLOPCounter.count_ops(mlp, rows)": "belongs to an instance",
    'OptimizedBackend().dispatch("conv2d", images, conv)': "argument 2 of 'conv2d' is a Conv2d; pass its weight.data",
    'OptimizedBackend().dispatch("matmul", a)': "matmul(a, b, ",
    "FLOPCounter().count_ops(models.mlp, rows)": "function mlp (call it: mlp(...))",
    "quantize(models.mlp, rows)": "function mlp (call it",
    "prune(nn.Linear, 0.7)": "class Linear (pass an instance",
    "prune(0.7, mlp)": "an nn.Module, not float",
    "MagnitudePruner().prune(0.7, weights)": "not numpy.ndarray",
    'INT8Quantizer().quantize_weights(weights, "digits")': "not str",
    "INT8Quantizer().dequantize(weights)": "what quantize_weights returned",
    "CachedAttention(32, 4).forward(words, KVCache)": "class KVCache (pass an instance",
    'CompetitionSubmission("MLP_SPRINT", "owls", reference_recipe("MLP_SPRINT"))': "the team's name, not a Recipe",
    "reference_recipe(mlp)": "no event 'Sequential'",
    "matmul_naive([[1, 2], [3]], b)": "a list is not an array",
    "matmul_naive(linear, b)": "not Linear and float32",
    "load_model(models.mlp)": "function mlp",
    "KVCache(max_seq_len=8, num_heads=4, head_dim=8)": "did you mean 'n_heads'",
    "CachedAttention(32, n_heads=4)": "did you mean 'num_heads'",
    "INT8Quantizer(bits=4)": "INT8Quantizer has no argument 'bits'",
    "Timer(runs=10)": "Timer has no argument 'runs'",
    "CompetitionSubmission('MLP_SPRINT', reference_recipe('MLP_SPRINT'), team_name='owls')": "did you mean 'team'",
    "calibrate(cnn, 'digits')": "str is not calibration data",
    "calibrate(gpt, prompt[None])": "use quantize(model)",
    "optim.Adam(mlp, lr=1e-3)": "pass model.parameters()",
    "optim.SGD(mlp.parameters(), lr='0.1')": "must be a number of at least 0, not '0.1'",
    "nn.Linear('128', 64)": "in_features must be an integer, not '128'",
    "nn.Linear(128, 64.0)": "out_features must be an integer, not 64.0",
    "nn.Linear(-1, 64)": "must not be negative",
    "nn.Linear(in_features=8, out_feature=4)": "did you mean 'out_features'",
    "nn.Conv2d(3, 8, '3')": "kernel_size must be an integer or a pair of integers",
    "nn.Conv2d(3, 8, 3, padding='full')": "padding is numbers",
    "nn.Embedding('96', 8)": "num_embeddings must be an integer",
    "nn.Dropout('0.5')": "p must be a number",
    "CachedAttention('32', 4)": "embed_dim must be an integer",
    "OptimizedBackend().dispatch(a, b)": "the name of an operation first",
    "models.pretrained(mlp)": "no trained weights for a Sequential",
    "nn.Dropout(1.5)": "between 0 and 1",
    "save('mlp.safetensors', mlp)": "save(model, path) takes a module",
    "rank(cnn, weights)": "a trained cost model or its file, not a Sequential",
}


@functools.cache
def _names() -> dict[str, Any]:
    """Names that the calls use."""
    packages = ("backend", "quantize", "prune", "generate", "profile", "bench")
    names: dict[str, Any] = {}
    for package in packages:
        module = getattr(tilewise, package)
        names |= {name: getattr(module, name) for name in module.__all__}
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    names["torch"] = pytest.importorskip("torch")
    names |= {
        "np": np,
        "Tensor": Tensor,
        "data": data,
        "load_model": load_model,
        "optim": optim,
        "save": save,
        "models": models,
        "nn": nn,
        "digits": data.digits(),
    }
    names |= {"a": draw(24, 24), "b": draw(24, 24), "weights": draw(64, 128), "rows": draw(4, 128)}
    names |= {"images": draw(2, 3, 8, 8), "conv": nn.Conv2d(3, 8, 3, padding=1), "linear": nn.Linear(128, 64)}
    names |= {name: models.pretrained(name) for name in ("cnn", "mlp", "gpt")}
    names |= {"key": draw(1, 4, 3, 8), "value": draw(1, 4, 3, 8), "words": Tensor(draw(1, 6, 32))}
    names |= {"rank": rank, "cache": names["KVCache"](8, 4, 8), "prompt": data.text().valid[:16]}
    names["cache"].update(0, names["key"], names["value"], 0)
    timer = names["timer"] = names["Timer"](sample_seconds=1e-5)
    names["timing"] = timer.measure(lambda: names["a"] @ names["b"], runs=5)
    return names


def _skip_without_kernels(call: str) -> None:
    if native is None and call.startswith("matmul_native"):
        pytest.skip("this product is compiled")


@pytest.mark.parametrize("call", WORKING.strip().splitlines())
def test_a_call_of_the_plan_works(call, tmp_path):
    _skip_without_kernels(call)
    save(models.pretrained("mlp"), tmp_path / "mlp.safetensors")
    result = eval(call, _names() | {"mlp_file": tmp_path / "mlp.safetensors"})  # noqa: S307
    assert " object at 0x" not in repr(result) or call.startswith(("ProfilerContext", "Competition"))


@pytest.mark.parametrize(("call", "advice"), EXPLAINED.items())
def test_a_wrong_call_of_the_plan_is_explained_in_one_sentence(call, advice):
    _skip_without_kernels(call)
    with pytest.raises(TilewiseError) as caught:
        eval(call, dict(_names()))  # noqa: S307
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_that_convert_a_layer_compute_what_it_computes():
    names = _names()
    for quantized, layer, x in (
        (tilewise.quantize.QuantizedConv2d.from_float(names["conv"])(names["images"]).dequantize(), "conv", "images"),
        (tilewise.quantize.QuantizedLinear.from_float(names["linear"])(names["rows"]), "linear", "rows"),
    ):
        expected = np.asarray(names[layer](Tensor(names[x])))
        assert np.abs(np.asarray(quantized) - expected).max() < 0.03 * np.abs(expected).max()


def test_numbers_give_a_ratio_and_a_cache_says_what_it_holds():
    assert tilewise.bench.compute_speedup(3.0, 2.0) == 1.5
    assert repr(_names()["cache"]).startswith("KVCache(max_seq_len=8, n_heads=4, head_dim=8, n_layers=1, batch_size=1")
