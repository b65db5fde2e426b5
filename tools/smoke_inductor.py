"""Check the promises of `tilewise.inductor` on this GPU: `python3 -m tools.smoke_inductor [WORD...]`.

A second process compiles without measuring (without PyTorch's own caches: no product). A template with a wrong result
is never chosen; one that crashes or hangs costs a separate process and nothing else. Convolution and flexible attention
compile and are right. On a GPU without a model PyTorch chooses by itself. Choosing takes milliseconds. Every line ends
with yes or NO.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilewise.inductor
from tilewise.gpu.inductor.decision_log import report
from tilewise.store.store import Store
from tools.spoiled import spoiled


class _BenchmarkCounter:
    """Counts how often the compiler timed choices, of products and of other kernels.

    PyTorch's own counter cannot be used: it is restored together with cached results.
    """

    count = others = 0

    @classmethod
    def watch(cls) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
        from torch._inductor.select_algorithm import AlgorithmSelectorCache

        for owner, name, counter in ((AlgorithmSelectorCache, "benchmark", "count"),
                                     (CachingAutotuner, "autotune_to_one_config", "others")):  # fmt: skip
            setattr(owner, name, cls._counting(getattr(owner, name), counter))

    @classmethod
    def _counting(cls, function: Callable[..., Any], counter: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            setattr(cls, counter, getattr(cls, counter) + 1)
            return function(*args, **kwargs)

        return wrapper


def _model(x: Any, w: Any, b: Any) -> Any:
    y = torch.nn.functional.gelu(torch.addmm(b, x, w.T))
    return torch.nn.functional.layer_norm(y, y.shape[-1:]) @ w


def _compiled(records: Path, caches: bool) -> tuple[int, int]:
    """Compile and run a small model in this process; return how many products and other kernels were measured."""
    import torch._inductor.config as config

    shapes = ((1500, 768), (3072, 768), (3072,))
    generator = torch.Generator(device="cuda").manual_seed(1)
    x, w, b = (torch.randn(*s, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.1 for s in shapes)
    with torch.no_grad(), config.patch(force_disable_caches=not caches), tilewise.inductor.enable(records=records):
        result, expected = torch.compile(_model)(x, w, b), _model(x, w, b)
    error = ((result - expected).float().norm() / expected.float().norm()).item()
    if not error < 2e-2:
        raise RuntimeError(f"differs by {error}")
    return _BenchmarkCounter.count, _BenchmarkCounter.others


def in_a_process(records: Path, caches: bool, where: Path) -> tuple[int, int, float]:
    start = time.monotonic()
    command = [sys.executable, "-m", "tools.smoke_inductor", "--one", str(records), str(int(caches))]
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(where)})  # fmt: skip
    products, others = map(int, process.stdout.split()[-2:])
    return products, others, time.monotonic() - start


def no_measurement_in_a_second_process() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        records, where = Path(folder) / "records", Path(folder) / "cache"
        first = in_a_process(records, True, where)
        cached, uncached = in_a_process(records, True, where), in_a_process(records, False, Path(folder) / "other")
    print("  measured products, others, seconds: first", first, "with PyTorch's caches", cached, "without", uncached)
    return first[0] > 0 and cached[:2] == (0, 0) and uncached[0] == 0


def _spoiled_bmm(how: str, batch: int, most: int = 64, isolated: bool = False) -> tuple[Any, int, int, bool]:
    """Compile a batched product whose templates have a fault.

    Return its row of the report, how many templates were changed, how many could be timed, and whether the result is
    right.
    """
    import torch._inductor.config as config

    a, b = (torch.randn(batch, 512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    patches = {"force_disable_caches": True, "max_autotune_subproc_result_timeout_seconds": 30.0}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), config.patch(patches):
        torch._dynamo.reset()
        start = time.monotonic()
        enabled = tilewise.inductor.enable(records=Path(folder), isolated=isolated)
        with enabled, spoiled(how, most) as changed:
            result = torch.compile(torch.bmm)(a, b)
        expected, seconds = torch.bmm(a, b), time.monotonic() - start
        (row,) = report(Path(folder))["rows"]
        with Store(enabled.advisor.log.memory.store_file, create=False) as store:
            timed_count = sum(
                "library" not in key for batch in store.batches(store.kernels()[0]) for key in batch.runtime_ns
            )
    error = ((result - expected).float().norm() / expected.float().norm()).item()
    print(f"  chose {row['kept']} of {row['considered']} in {row['seconds'] * 1e3:.2f} ms")
    print(f"  {len(changed)} of {row['kept'] - 1} templates: each {how}; {timed_count} timed, chosen {row['fastest']}, "
          f"differs by {error:.1e}, {seconds:.1f} s, {enabled.advisor.notes}", flush=True)  # fmt: skip
    return row, len(changed), timed_count, error < 2e-2


def a_wrong_template_is_never_chosen() -> bool:
    row, changed, _, right = _spoiled_bmm("is wrong", 40)
    return bool(changed) and row["fastest"] == "ATen" and right


def a_template_that_crashes_costs_nothing_but_itself() -> bool:
    """Try the template in a separate process: this one still computes, and the next product is measured as usual."""
    row, changed, _, right = _spoiled_bmm("crashes", 41, isolated=True)
    then, _, timed_count, fine = _spoiled_bmm("crashes", 42, most=0, isolated=True)
    return bool(changed) and row["fastest"] == "ATen" and right and fine and timed_count == then["kept"] - 1


def a_template_that_hangs_costs_nothing_but_itself() -> bool:
    row, changed, timed_count, right = _spoiled_bmm("hangs", 43, most=1, isolated=True)
    return changed == 1 and timed_count == row["kept"] - 2 and right


def convolution_and_attention_are_right() -> bool:
    """Compile both with tilewise and compare the results with PyTorch's."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    image, weight = torch.randn(16, 64, 56, 56, device="cuda"), torch.randn(128, 64, 3, 3, device="cuda")
    image, weight = (x.to(torch.bfloat16, memory_format=torch.channels_last) for x in (image, weight))
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
        "flex": (flex_attention, (q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v)),
        "convolution": (torch.conv2d, (image, weight), torch.conv2d(image, weight)),
    }
    fine = True
    for name, (call, inputs, expected) in cases.items():
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            torch._dynamo.reset()
            before, start = _BenchmarkCounter.count, time.monotonic()
            with tilewise.inductor.enable(records=Path(folder)) as enabled:
                result = torch.compile(call)(*inputs)
            error = ((result - expected).float().norm() / expected.float().norm()).item()
            print(f"  {name}: differs by {error:.1e}, {time.monotonic() - start:.1f} s, measured "
                  f"{_BenchmarkCounter.count - before}, notes {enabled.advisor.notes}")  # fmt: skip
            fine &= error < 2e-2 and not enabled.advisor.notes
    return fine


def what_has_no_model_is_not_searched() -> bool:
    """Compile a float32 product and a baddbmm: both get PyTorch's default, which measures nothing."""
    a, b = torch.randn(512, 768, device="cuda"), torch.randn(768, 640, device="cuda")
    c, d, e = (torch.randn(8, 256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    fine = True
    for call, inputs in ((torch.mm, (a, b)), (torch.baddbmm, (c, d, e))):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            torch._dynamo.reset()
            before, start = _BenchmarkCounter.count, time.monotonic()
            with tilewise.inductor.enable(records=Path(folder)) as enabled:
                result, expected = torch.compile(call)(*inputs), call(*inputs)
            error, measurements = (
                ((result - expected).float().norm() / expected.float().norm()).item(),
                _BenchmarkCounter.count - before,
            )
            print(
                f"  {call.__name__}: differs by {error:.1e}, {time.monotonic() - start:.1f} s, measured {measurements}"
            )
            fine &= error < 2e-2 and not measurements and not enabled.advisor.notes
    return fine


def another_gpu_is_left_to_pytorch() -> bool:
    """Pretend to be a GPU without a model: one warning, and no setting changes."""
    import torch._inductor.config as config

    before, real = config.save_config_portable(), torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *_: (8, 9)
    try:
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            active = tilewise.inductor.enable().active
    finally:
        torch.cuda.get_device_capability = real
    print("  said:", [str(one.message) for one in messages])
    return not active and len(messages) == 1 and config.save_config_portable() == before


def choosing_takes_milliseconds() -> bool:
    from tools.choosing_time import report

    return report() < 2.0


def main() -> int:
    """Check every promise whose name contains one of the words, and return how many failed."""
    _BenchmarkCounter.watch()
    if sys.argv[1:2] == ["--one"]:
        print(*_compiled(Path(sys.argv[2]), bool(int(sys.argv[3]))))
        return 0
    failed, words = 0, sys.argv[1:]
    for promise in (choosing_takes_milliseconds, another_gpu_is_left_to_pytorch,
                    what_has_no_model_is_not_searched, a_wrong_template_is_never_chosen,
                    convolution_and_attention_are_right, no_measurement_in_a_second_process,
                    a_template_that_crashes_costs_nothing_but_itself,
                    a_template_that_hangs_costs_nothing_but_itself):  # fmt: skip
        if words and not any(word in promise.__name__ for word in words):
            continue
        is_kept = False
        try:
            with contextlib.suppress(KeyboardInterrupt):
                is_kept = promise()
        except Exception:
            print(traceback.format_exc()[-2500:])
        failed += not is_kept
        print(f"{promise.__name__.replace('_', ' ')}: {'yes' if is_kept else 'NO'}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
