"""llama.cpp as a contender: a model file decoded token by token, prefilled, or asked for the logits of a text."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7}


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: Any) -> None:
    """llama.cpp's log goes nowhere."""


llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


def quantized(path: Path, kind: str) -> Path:
    """The file in llama.cpp's own quantization, next to it."""
    to = path.with_suffix(f".{kind}.gguf")
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[kind], 1
    if llama_cpp.llama_model_quantize(str(path).encode(), str(to).encode(), ctypes.byref(parameters)) != 0:
        raise SystemExit(f"llama.cpp could not quantize {path} to {kind}")
    return to


class LlamaCpp:
    """One context of one model file, on the given number of threads."""

    def __init__(self, path: Path, context: int, threads: int = 1) -> None:
        model_parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_parameters)
        if not self.model:
            raise SystemExit(f"llama.cpp could not load {path}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = context
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(context, 0, 1)

    def run(self, tokens: Any, position: int, everywhere: bool = False) -> np.ndarray:
        """Logits of the last token, or of all; what was stored from `position` on is forgotten."""
        llama_cpp.llama_memory_seq_rm(self.memory, 0, position, -1)
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i] = int(token), position + i
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
            self.batch.logits[i] = everywhere or i == len(tokens) - 1
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama.cpp could not decode")
        rows = range(len(tokens)) if everywhere else [len(tokens) - 1]
        logits = [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, i), (self.vocabulary,)) for i in rows
        ]
        return np.stack(logits) if everywhere else logits[0].copy()
