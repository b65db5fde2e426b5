"""Models in GGUF files: every form of weights is read as the `gguf` package reads it, and decodes as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from gguf_samples import (  # noqa: E402
    DESCRIPTIONS,
    KINDS,
    rounded,
    small_decoder,
    small_gpt,
    small_llama,
    write_gpt2,
    write_llama,
)

from tilewise import no_grad  # noqa: E402
from tilewise.errors import FileFormatError, MissingFileError  # noqa: E402
from tilewise.generate import generate, make_engine, new_cache  # noqa: E402
from tilewise.gguf import load_gguf, read_gguf  # noqa: E402
from tilewise.gguf.models import ARCHITECTURES  # noqa: E402
from tilewise.gguf.tensors import KINDS as READ  # noqa: E402
from tilewise.nn import RMSNorm  # noqa: E402
from tilewise.quantize.block_linear import BlockLinear  # noqa: E402

assert set(DESCRIPTIONS) == set(ARCHITECTURES)
IDS = np.array([[5, 9, 3, 60, 0]])
SAMPLES: dict[str, Any] = {"gpt2": (small_gpt, write_gpt2), "llama": (small_llama, write_llama)}


def logits(model: Any) -> np.ndarray:
    with no_grad():
        engine_logits: np.ndarray = model(IDS).data
    return engine_logits


def as_stored(model: Any, kind: str) -> Any:
    """The model with every matrix as the file holds it."""
    for name, tensor in model.named_tensors():
        if tensor.ndim == 2 and "position" not in name:
            tensor.data[...] = rounded(tensor.data, kind)
    return model


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_floats_give_the_logits_of_the_weights_written(sample: str, kind: str, tmp_path: Path) -> None:
    make, write = SAMPLES[sample]
    write(make(), tmp_path / "m.gguf", kind)
    loaded = load_gguf(tmp_path / "m.gguf")
    expected = logits(as_stored(make(), kind))
    # CPUs with AVX512_BF16 round the inputs of BF16 layers to 8 bits, in about ten layers one after the other.
    tolerance = 10 * 2**-9 * np.abs(expected).max() if kind == "BF16" else 1e-6
    np.testing.assert_allclose(logits(loaded.model), expected, rtol=1e-5, atol=tolerance)
    assert (loaded.weights, loaded.kind) == ("float32", kind)
    assert loaded.tokenizer is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_quantized_layers_compute_on_the_blocks_of_the_file(sample: str, kind: str, tmp_path: Path) -> None:
    make, write = SAMPLES[sample]
    write(make(), tmp_path / "m.gguf", kind)
    model = load_gguf(tmp_path / "m.gguf").model
    assert isinstance(model.head, BlockLinear)
    np.testing.assert_array_equal(model.head.dequantize(), rounded(make().head.weight.data, kind))
    expected = logits(as_stored(make(), kind))
    assert np.abs(logits(model) - expected).max() < 0.03 * np.abs(expected).max()  # inputs are int8


def test_a_file_with_every_quantized_format_decodes_as_its_weights_do(tmp_path: Path) -> None:
    write_llama(small_llama(width=256, hidden=256), tmp_path / "m.gguf", "every")
    model, floats = load_gguf(tmp_path / "m.gguf").model, small_llama(width=256, hidden=256)
    layers = dict(model.named_modules())
    for name, layer in floats.named_modules():
        if isinstance(layers[name], BlockLinear):
            layer.weight.data[...] = layers[name].dequantize()
    floats.token_embedding.weight.data[...] = model.token_embedding.kernel.rows(np.arange(64))
    for source, to in zip(model.modules(), floats.modules(), strict=True):
        if isinstance(source, RMSNorm):
            to.weight.data[...] = source.weight.data
    expected = logits(floats)
    assert np.abs(logits(model) - expected).max() < 0.05 * np.abs(expected).max()  # inputs are int8
    # The native decoder and the model's own layers compute the same products.
    tokens = list(generate(model, [1, 2, 3], 20))
    assert tokens == list(generate(model, [1, 2, 3], 20, use_cache=False))


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    write_llama(small_llama(), tmp_path / "m.gguf")
    content, info = (tmp_path / "m.gguf").read_bytes(), read_gguf(tmp_path / "m.gguf").tensors["blk.0.ffn_up.weight"]
    start = min(t.offset for t in read_gguf(tmp_path / "m.gguf").tensors.values())
    entry = content.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16 + 4
    assert content[entry : entry + 8] == (info.offset - start).to_bytes(8, "little")
    (tmp_path / "m.gguf").write_bytes(content[:entry] + bytes(8) + content[entry + 8 :])
    with pytest.raises(FileFormatError, match="overlaps"):
        load_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_file_generates_what_the_model_does(sample: str, tmp_path: Path) -> None:
    make, write = SAMPLES[sample]
    write(make(), tmp_path / "m.gguf")
    loaded = load_gguf(tmp_path / "m.gguf")
    assert list(generate(loaded.model, [1, 2, 3], 64)) == list(generate(make(), [1, 2, 3], 64))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_described_and_generates_as_written(architecture: str, tmp_path: Path) -> None:
    model = small_decoder(architecture)
    if architecture.startswith("gemma"):  # the output layer is the token embedding
        model.head.weight.data[...] = model.token_embedding.weight.data
    write_llama(model, tmp_path / "m.gguf", architecture=architecture)
    loaded: Any = load_gguf(tmp_path / "m.gguf").model
    for name, value in vars(model.config).items():
        if name != "long_context" or architecture == "phi3":
            np.testing.assert_allclose(*map(_number, (getattr(loaded.config, name), value)), 1e-6, err_msg=name)
    for length in (20, 64):  # Phi-3's other frequencies begin at 48 positions
        assert list(generate(loaded, [1, 2, 3], length)) == list(generate(model, [1, 2, 3], length))


def _number(value: Any) -> Any:
    return len(value) if isinstance(value, str) else np.zeros(0) if value is None else np.asarray(value, float)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_tensor_that_the_architecture_does_not_use_is_one_sentence(architecture: str, tmp_path: Path) -> None:
    model = small_decoder("qwen3" if architecture == "llama" else "gemma3")
    write_llama(model, tmp_path / "m.gguf", architecture=architecture)
    with pytest.raises(FileFormatError, match=r"norm.weight', which is not supported"):
        load_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"rope.freq_base": 1.0, "rope.scaling.type": "yarn"}, "not above 1"),
        (
            {"rope.scaling.type": "dynamic"},
            "rotary scaling 'dynamic' is not supported; none, linear, longrope, yarn are",
        ),
        ({"attention.value_length": 8}, "different widths"),
        ({"attention.scale": 0.0}, "attention.scale is 0.0"),
        ({"attention.sliding_window": 4, "attention.sliding_window_pattern": [True]}, "1 entries for 2 layers"),
    ],
)
def test_options_that_make_no_sense_are_one_sentence(metadata: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = small_decoder("gemma2", windows=(0, 0), attention_cap=0.0, logit_cap=0.0)
    write_llama(model, tmp_path / "m.gguf", architecture="gemma2", metadata=metadata)
    with pytest.raises(FileFormatError, match=sentence):
        load_gguf(tmp_path / "m.gguf")


def test_mixtures_of_experts_are_one_sentence(tmp_path: Path) -> None:
    for architecture, experts in (("llama", 8), ("qwen3moe", 0)):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
        writer.add_expert_count(experts)
        writer.add_tensor("a", np.zeros((2, 2), np.float32))
        writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
        with pytest.raises(FileFormatError, match="mixture of experts"):
            load_gguf(tmp_path / "m.gguf")


def test_parts_of_a_split_model_are_one_sentence(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("a", np.zeros((2, 2), np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with pytest.raises(FileFormatError, match="one part of a split model"):
        load_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("code", READ)
def test_every_form_is_read_as_the_gguf_package_reads_it(code: int) -> None:
    kind = READ[code]
    raw = np.random.default_rng(0).integers(0, 256, (50, kind.block_bytes)).astype(np.uint8)
    if kind.block == 1:
        raw = (
            np.random.default_rng(0).standard_normal(50).astype(np.float32).view(np.uint8).reshape(-1, kind.block_bytes)
        )
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType(code)).reshape(-1)
        weights = kind.to_floats(raw).reshape(-1)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_tied_embeddings_and_stretched_rotary_positions_are_read(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", small_llama()
    write_llama(model, path)
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(tmp_path / "tied.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama.") and name != "llama.rope.freq_base":
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    for tensor in reader.tensors:
        if tensor.name != "output.weight":
            writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor("rope_freqs.weight", np.full(8, 4.0, np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    trained: Any = load_gguf(tmp_path / "tied.gguf").model
    np.testing.assert_array_equal(trained.head.weight.data, model.token_embedding.weight.data)
    expected = 500000.0 ** (-np.arange(8) / 8) / 8
    np.testing.assert_allclose(trained.config.frequencies, expected, rtol=1e-6)


def test_metadata_is_what_was_written(tmp_path: Path) -> None:
    write_llama(small_llama(), tmp_path / "m.gguf")
    file = read_gguf(tmp_path / "m.gguf")
    assert file.metadata["llama.attention.head_count_kv"] == 2
    assert file.metadata["general.architecture"] == "llama"
    assert file.tensors["blk.1.ffn_down.weight"].shape == (64, 96)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"block_count": 3}, "no tensor 'blk.2"),
        ({"feed_forward_length": 64}, "not"),
        ({"attention.head_count": 5}, "cannot be divided"),
        ({"attention.head_count_kv": 3}, "cannot share"),
        ({"context_length": 0}, "context_length"),
        ({"rope.dimension_count": 200}, "rotary"),
    ],
)
def test_sizes_that_do_not_fit_the_tensors_are_one_sentence(
    change: dict[str, int], sentence: str, tmp_path: Path
) -> None:
    write_llama(small_llama(), tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    for key, value in change.items():
        name = f"llama.{key}".encode()
        at = content.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + 4
        content = content[:at] + value.to_bytes(4, "little") + content[at + 4 :]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(FileFormatError, match=sentence):
        load_gguf(tmp_path / "m.gguf")


def test_other_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"x" * 100)
    with pytest.raises(FileFormatError, match="not a GGUF file"):
        load_gguf(tmp_path / "no.gguf")
    with pytest.raises(MissingFileError):
        load_gguf(tmp_path / "none.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("a", np.zeros((2, 2), np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with pytest.raises(
        FileFormatError,
        match="gpt2, llama, qwen2, qwen3, gemma, gemma2, gemma3, phi3, stablelm, starcoder2 are supported",
    ):
        load_gguf(tmp_path / "other.gguf")
    assert set(KINDS) <= {kind.name for kind in READ.values()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_tokens_are_llama_cpps(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", exc_type=Exception)
    from benchmarks.llama_cpp_peer import LlamaCpp

    model = small_decoder(architecture, seed=4, vocab=320)
    write_llama(model, tmp_path / "m.gguf", architecture=architecture)
    peer, model = LlamaCpp(tmp_path / "m.gguf", 96), load_gguf(tmp_path / "m.gguf").model
    prompt = [5, 9, 300, 17]
    rows = np.stack([np.array(prompt), np.zeros(4, int), np.arange(4)], 1)
    ours = make_engine(model).run(rows, new_cache(model, 1, 96), np.arange(4))
    theirs = peer.run(prompt, 0, everywhere=True)
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()
    tokens = list(generate(model, prompt, 64, cache=new_cache(model, 1, 96)))
    logits = [peer.run(prompt, 0), *(peer.run([t], len(prompt) + i) for i, t in enumerate(tokens[:-1]))]
    assert [int(row.argmax()) for row in logits] == tokens
