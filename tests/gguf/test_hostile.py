"""Damaged GGUF files: one sentence each, or a model that generates; never a crash, a traceback or much memory."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf_samples import (
    byte_level_vocabulary,
    sentencepiece_vocabulary,
    small_decoder,
    small_gpt,
    small_llama,
    write_gpt2,
    write_llama,
)

from tilewise.errors import FileFormatError, TilewiseError
from tilewise.generate import generate
from tilewise.gguf import load_gguf

COUNT = int(os.environ.get("TILEWISE_GGUF_MUTATIONS", "100"))  # of each sample
HUGE = [0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1]


TEMPLATE = "{% for m in messages %}{% if loop.first %}{{ m.role | upper }}{% endif %}{{ m['content'] }}{% endfor %}"
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0}
_WINDOWS = {"attention.sliding_window_pattern": [True, False], "rope.freq_base_swa": 1e4, "attention.scale": 0.5}
# Architecture, weights and more metadata of samples whose header consists mostly of sizes and options.
OPTION_SAMPLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "floats": ("llama", "F16", {}),
    "gemma2": ("gemma2", "Q5_0", _WINDOWS),
    "qwen3": ("qwen3", "F32", _YARN | {"rope.scaling.original_context_length": 32, "expert_count": 0}),
    "phi3": ("phi3", "Q8_0", {"rope.scaling.type": "longrope", "attention.sliding_window": 64}),
}
SAMPLES = ("gpt2", "llama", "blocks", *OPTION_SAMPLES)


def write_sample(which: str, path: Path) -> None:
    """Write the file of this name in `SAMPLES`."""
    if which in OPTION_SAMPLES:
        architecture, kind, metadata = OPTION_SAMPLES[which]
        model = small_decoder(architecture, vocab=32, hidden=32)
        return write_llama(model, path, kind, architecture, metadata)
    if which == "blocks":  # every quantized format
        return write_llama(small_llama(vocab=32, width=256, hidden=256), path, "every")
    if which == "gpt2":
        words = byte_level_vocabulary()
        return write_gpt2(small_gpt(vocab=len(words["tokens"]), width=32), path, "Q4_1", **words)
    pieces = sentencepiece_vocabulary() | {"template": TEMPLATE}
    return write_llama(small_llama(vocab=len(pieces["tokens"]), width=32, hidden=32), path, "Q4_0", **pieces)


def mutated(content: bytes, header: int, rng: np.random.Generator) -> bytes:
    """One to four changes, mostly in the header."""
    changed = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(0, header if rng.random() < 0.9 else len(changed)))
        at = min(at, max(0, len(changed) - 9))
        choice = rng.integers(0, 5)
        if choice == 0:
            changed[at] ^= 1 << int(rng.integers(0, 8))
        elif choice == 1:
            changed[at : at + 8] = struct.pack("<Q", int(rng.choice(np.array(HUGE, np.uint64))))
        elif choice == 2:
            changed[at : at + 4] = struct.pack("<I", int(rng.integers(0, 40)))
        elif choice == 3:
            del changed[at : at + int(rng.integers(1, 40)) if rng.random() < 0.8 else None]
        else:
            changed[at:at] = changed[at : at + int(rng.integers(1, 40))]
        if len(changed) < 40:
            break
    return bytes(changed)


def use(path: Path) -> None:
    """Load a file, tokenize, generate a token, and write a conversation if there is a template."""
    loaded = load_gguf(path)
    ids = [0] if loaded.tokenizer is None else loaded.tokenizer.encode("the thing é")
    ids = [i for i in ids if i < loaded.model.vocab][:4] or [0]
    new = list(generate(loaded.model, ids[: loaded.model.context], 1))
    if loaded.tokenizer is not None:
        loaded.tokenizer.token_bytes(new[0])
    if loaded.chat_template is not None:
        loaded.chat_tokens([{"role": "user", "content": "the thing"}])


@pytest.mark.parametrize("which", SAMPLES)
def test_mutated_files_are_one_sentence_or_a_model(which: str, tmp_path: Path) -> None:
    path, rng, count = tmp_path / "m.gguf", np.random.default_rng(7), 0
    write_sample(which, path)
    content = path.read_bytes()
    header = content.index(b"output_norm.weight") + 200
    for _ in range(COUNT):
        path.write_bytes(mutated(content, header, rng))
        try:
            use(path)
            count += 1
        except TilewiseError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 1500
    assert count < COUNT


def header_of(*parts: bytes) -> bytes:
    return b"GGUF" + struct.pack("<I", 3) + b"".join(parts) + b"\0" * 64


@pytest.mark.parametrize(
    "content",
    [
        header_of(struct.pack("<QQ", 2**60, 0)),
        header_of(struct.pack("<QQ", 0, 2**60)),
        header_of(struct.pack("<QQ", 0, 1), struct.pack("<Q", 2**62)),
        header_of(struct.pack("<QQ", 0, 1), struct.pack("<Q", 1), b"k", struct.pack("<IIQ", 9, 8, 2**61)),
        header_of(struct.pack("<QQ", 0, 1), struct.pack("<Q", 1), b"k", struct.pack("<IIQ", 9, 12, 2**61)),
        header_of(struct.pack("<QQ", 0, 1), struct.pack("<Q", 1), b"k", struct.pack("<IIQ", 9, 9, 3)),
        header_of(struct.pack("<QQ", 1, 0), struct.pack("<Q", 1), b"t", struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)),
        header_of(struct.pack("<QQ", 1, 0), struct.pack("<Q", 1), b"t", struct.pack("<IQIQ", 1, 64, 0, 2**63)),
    ],
)
def test_claims_larger_than_the_file_are_refused_before_memory_is_taken(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(FileFormatError):
        load_gguf(path)


def test_a_long_word_is_tokenized_in_little_time(tmp_path: Path) -> None:
    path, pieces = tmp_path / "m.gguf", sentencepiece_vocabulary()
    write_llama(small_llama(vocab=len(pieces["tokens"]), width=32, hidden=32), path, **pieces)
    words = load_gguf(path).tokenizer
    assert words is not None
    assert len(words.encode("t" * 50_000)) == 50_001  # quadratic merging would take minutes
