"""Cases and rows: what the results files measured, against which peers, and the table row each case belongs to.

A case is one piece of work on one kind of CPU. Every peer ever timed on it counts, whatever file holds the time: the
case's ratio is against the fastest of them. A peer's ratio is its time divided by tilewise's in the same run, so times
of different runs are never compared. A case without a peer that its line requires is listed and not counted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.results_files import RESULTS, ROOT, kinds, read

NOT_HELD = "(not held to AVX2)"  # in the name of a peer that may use instructions denied to the others: not counted


@dataclass(frozen=True)
class Line:
    """A line of the results page: the cases of some files whose names match a pattern."""

    row: str  # key of README's row (ROWS), "self" for comparisons with tilewise itself, "check" for what is not a time
    label: str
    files: str
    names: str = ""
    requires: tuple[str, ...] = ()  # beginnings of peers' names without which a ratio does not count


# The rows of README: title, and the short benchmark that `make reproduce ROW=key` runs.
ROWS: Mapping[str, tuple[str, str]] = {
    "products": ("Matrix products, float32", "gemm --only large"),
    "networks": ("Networks, float32", "networks --only resnet18 mobilenet_v2 --batch 1 --threads 1 --forms float32"),
    "int8": ("Networks and products, INT8", "networks --only resnet18 mobilenet_v2 --batch 1 --threads 1 --forms int8"),
    "sparse": ("Sparse layers, 70 and 90 % zeros", "sparse"),
    "tokens": ("GPT, next token", "llama_cpp decode"),
    "prompts": ("GPT, prompt of 256 tokens", "llama_cpp prefill"),
    "gguf": ("GGUF files, tokens and prompts", "gguf_models smollm --kinds F16 Q8_0"),
    "training": ("Training steps and single operators", "train_step --threads 1 --budget 2"),
}

_CUBE = r"^(51\d|[5-9]\d\d|\d{4})×\1×\1$"
_LAYER = r"^\d+×(768×768|2304×768|3072×768|768×3072|1024×1024|4096×1024|1024×4096)( [nt]{2})?$"
_RUNTIMES = ("onnxruntime", "openvino")
LINES = (  # a case belongs to the first line that matches
    Line("self", "Four-bit weights against eight", "llama_cpp", "four bits"),
    Line("self", "INT8 against our float32, direct convolutions", "int8|networks", "without Winograd"),
    Line("self", "INT8 against our float32", "int8", "to float32"),
    Line("self", "INT8 CNN against our NumPy backend", "int8", "to NumPy"),
    Line("self", "Several threads against one", "gemm|decode", "threads? beside one|beside one thread"),
    Line("self", "KV cache against none, 200 tokens", "decode", "200 tokens"),
    Line("self", "Pruned networks against their own dense plans", "pruned"),
    Line("self", "Chosen convolution algorithm against the best of three", "algorithms"),
    Line("check", "Exponent of generation time in tokens", "decode", "exponent"),
    Line("check", "Share of memory bandwidth while decoding", "decode", "bandwidth"),
    Line("check", "Perplexity against the peer's at the same bits", "llama_cpp|ctranslate2", "perplexity"),
    Line("check", "Profiler against pyperf, and its overhead", "profiling"),
    Line("products", "Matrix products: large cubes", "gemm", _CUBE, ("numpy", "pytorch")),
    Line("products", "Matrix products: layers of transformers", "gemm", _LAYER, ("numpy", "pytorch")),
    Line("products", "Matrix products: small, skinny and odd", "gemm", "", ("numpy", "pytorch")),
    Line("training", "Training steps", "train_step|conv|rows", "training step"),
    Line(
        "networks",
        "Networks: CNNs and transformers",
        "networks|conv",
        "(float32|forward.*tokens|convolutions.*)$",
        _RUNTIMES,
    ),
    Line("networks", "Networks: timm's", "others", "", _RUNTIMES),
    Line("int8", "INT8 networks", "networks|int8", "int8$", ("openvino",)),
    Line("int8", "INT8 matrix products", "int8"),
    Line("sparse", "Sparse INT8 linear layers", "sparse", "^int8"),
    Line("sparse", "Sparse 3×3 convolutions", "sparse", "^3×3"),
    Line("sparse", "Sparse 1×1 convolutions", "sparse", "^1×1"),
    Line("sparse", "Sparse linear layers", "sparse"),
    Line("tokens", "GPT: next token", "decode|llama_cpp|ctranslate2", "next token", ("llama.cpp",)),
    Line("prompts", "GPT: prompt of 256", "llama_cpp|ctranslate2", "prompt of 256", ("llama.cpp", "ctranslate2")),
    Line("gguf", "GGUF models: tokens", "gguf_models", "a token|sequences", ("llama.cpp",)),
    Line("gguf", "GGUF models: prompts", "gguf_models", "", ("llama.cpp",)),
    Line("training", "GPT: forward pass", "rows|train_step", "forward"),
    Line("training", "Operators: softmax, norms, GELU, attention, gradients, AdamW", "rows"),
    Line("training", "Graph networks of the cost model", "costmodel"),
)
# Names under which several files time the same work.
_SAME_WORK = (
    (r"^routing (.+) \(\w+\)$", r"\1"),
    (r"^(vgg6|resnet8) forward, batch (\d+)$", r"\1 3×32×32, batch \2, float32"),
    (r"^(vgg6|resnet8) batch (\d+)$", r"\1 3×32×32, batch \2, int8"),
    (r"^(vgg6|resnet8), batch (\d+)$", r"\1 training step, batch \2"),
    (r"^(gpt \S+), (\d+ x \d+) tokens$", r"\1 training step \2"),
    (r"^(gpt \S+) forward, (\d+ x \d+) tokens$", r"\1 forward \2"),
    (r"^(gpt.*), (?:a token at position 64|16 tokens after one)$", r"\1, next token"),
    (r"^(gpt.*), a prompt of 256(?: and a token)?$", r"\1, prompt of 256"),
)
# Native sources that a results file times, by pattern of their paths; the first pattern of the file's name holds.
SOURCES = (
    ("gemm|tuning", r"gemm|gemv|matmul|product_"),
    ("int8", r"int8|int16|integer_layer|graph/|ops/"),
    ("sparse", r"sparse"),
    ("decode|llama_cpp|ctranslate2|gguf", r"decoder|block_|half_dot|int8_dot|kv_attention|rope_rmsnorm|gemv|gemm"),
    ("rows", r"norm|softmax|attention|elementwise|row_|activation|gemm|matmul"),
    ("costmodel", r"sage|ranker"),
    ("", r"kernels/|graph/|ops/|convolution|matmul|product_|int8|int16|integer_layer|row_ops|attention_ops"),
)


@dataclass
class Case:
    """One piece of work on one kind of CPU: the ratio to each peer, in which file and when it was measured."""

    line: Line
    kind: str
    name: str
    threads: int
    ratios: dict[str, float] = field(default_factory=dict)
    dates: set[str] = field(default_factory=set)
    is_stale: bool = False

    @property
    def ratio(self) -> float:
        return min(ratio for peer, ratio in self.ratios.items() if NOT_HELD not in peer)

    @property
    def fastest_peer(self) -> str:
        return min((peer for peer in self.ratios if NOT_HELD not in peer), key=self.ratios.__getitem__)

    @property
    def missing_peers(self) -> list[str]:
        return [need for need in self.line.requires if not any(peer.startswith(need) for peer in self.ratios)]


def all_cases() -> list[Case]:
    """Every case of every timing file, in the order of the files; a case that no line takes is an error."""
    cases: dict[tuple[str, str, str, int], Case] = {}
    for file, kind, row in timings():
        name = same_work(row["name"])
        line = line_of(file, name)
        case = cases.setdefault((line.label, kind, name, row["threads"]), Case(line, kind, name, row["threads"]))
        for peer, ratio in peer_ratios(row).items():  # a peer in two runs counts with the worse of its ratios
            case.ratios[peer] = min(ratio, case.ratios.get(peer, ratio))
        case.dates.add(row["date"])
        case.is_stale |= row.get("source") != source_hash(file)
    return list(cases.values())


def timings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """File, kind of CPU and row of every timing that was recorded."""
    files = sorted({path.stem for path in (*RESULTS.glob("*.json"), *RESULTS.glob("*/*.json"))})
    for file in files:
        for kind in kinds():
            content = read(file, kind)
            for row in content["rows"]:
                yield file, kind, {"date": content.get("date", ""), **row}


def same_work(name: str) -> str:
    for pattern, replacement in _SAME_WORK:
        name = re.sub(pattern, replacement, name)
    return name


def line_of(file: str, name: str) -> Line:
    for line in LINES:
        if re.fullmatch(line.files, file) and re.search(line.names, name):
            return line
    raise LookupError(f"{name!r} of {file}.json belongs to no line of benchmarks/cases.py; add one")


def peer_ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """Each peer's time over ours; the recorded ratio where a row does not compare times with ours."""
    seconds = dict(row["seconds"])
    ours = seconds.pop("tilewise", None)
    return {peer: value / ours for peer, value in seconds.items()} if ours else {"recorded": row["ratio"]}


@cache
def source_hash(file: str) -> str:
    """Hash of the kernel sources that a results file times, without comments and white space."""
    pattern = next(sources for files, sources in SOURCES if re.search(files, file))
    digest = hashlib.sha256()
    for path in sorted((ROOT / "native").rglob("*.[ch]*")):
        if re.search(pattern, str(path.relative_to(ROOT / "native"))) and "tests" not in path.parts:
            digest.update(re.sub(r"//[^\n]*|\s+", "", path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:16]


def age_note(content: Mapping[str, Any], file: str) -> str:
    """A remark for the date of results that are older than the kernels they time."""
    return "" if content.get("source") == source_hash(file) else " (the kernels have changed since)"


def counted_cases(cases: Iterable[Case]) -> list[Case]:
    """The cases that have all the peers their line requires."""
    return [case for case in cases if not case.missing_peers]
