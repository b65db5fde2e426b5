"""load a GGUF file and generate text"""

import numpy as np

from tilewise.generate import generate
from tilewise.gguf import load_gguf

WIDTH, HIDDEN, VOCABULARY = 64, 96, 3


def prepare() -> None:
    """Write a LLaMA of one layer with random weights and a vocabulary of three tokens."""
    from gguf import GGUFWriter

    writer = GGUFWriter("model.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "\u2581", "a"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_token_types([2, 1, 1])
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH)}
    shapes |= dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (WIDTH,))
    shapes |= {f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (HIDDEN, WIDTH), "blk.0.ffn_up": (HIDDEN, WIDTH), "blk.0.ffn_down": (WIDTH, HIDDEN)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.random.default_rng(0).random(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run() -> None:
    loaded = load_gguf("model.gguf")
    list(generate(loaded.model, loaded.tokenizer.encode("a"), 4, weights=loaded.weights))
