"""llama.cpp as a contender: a model file decoded token by token, prefilled, or asked for the logits of a text."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

# llama.cpp's numbers of its mixtures; without mixing, all matrices have the format that the mixture is named after.
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "BF16": 32}


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: Any) -> None:
    """llama.cpp's log goes nowhere."""


llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


def quantized(path: Path, kind: str, pure: bool = False) -> Path:
    """The file in llama.cpp's own quantization, next to it; `pure`: one format for all matrices."""
    to = path.with_suffix(f".{kind}.gguf")
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread, parameters.pure = FILE_TYPES[kind], 1, pure
    if llama_cpp.llama_model_quantize(str(path).encode(), str(to).encode(), ctypes.byref(parameters)) != 0:
        raise SystemExit(f"llama.cpp could not quantize {path} to {kind}")
    return to


class LlamaCpp:
    """One context of one model file, on the given number of threads."""

    def __init__(self, path: Path, context: int, threads: int = 1, sequences: int = 1) -> None:
        model_parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_parameters)
        if not self.model:
            raise SystemExit(f"llama.cpp could not load {path}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = context * sequences, sequences
        parameters.n_batch = parameters.n_ubatch = context
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(context, 0, 1)

    def run(self, tokens: Any, position: int, everywhere: bool = False) -> np.ndarray:
        """Logits of the last token, or of all; what was stored from `position` on is forgotten."""
        logits = self._decode([(token, 0, position + i) for i, token in enumerate(tokens)], everywhere)
        return logits if everywhere else logits[0]

    def step(self, tokens: Any, position: int) -> np.ndarray:
        """Logits of one token of each sequence at `position`."""
        return self._decode([(token, sequence, position) for sequence, token in enumerate(tokens)], True)

    def close(self) -> None:
        """Free the context and the model; several of them would compete for memory."""
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def _decode(self, items: list[tuple[Any, int, int]], everywhere: bool) -> np.ndarray:
        """Logits of the last item or of all, each a token of a sequence at a position."""
        for _, sequence, position in reversed(items):
            llama_cpp.llama_memory_seq_rm(self.memory, sequence, position, -1)
        self.batch.n_tokens = len(items)
        for i, (token, sequence, position) in enumerate(items):
            self.batch.token[i], self.batch.pos[i] = int(token), position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = everywhere or i == len(items) - 1
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama.cpp could not decode")
        rows = range(len(items)) if everywhere else [len(items) - 1]
        pointers = [llama_cpp.llama_get_logits_ith(self.context, i) for i in rows]
        return np.stack([np.ctypeslib.as_array(logits, (self.vocabulary,)) for logits in pointers])
