"""What `tilewise.inductor` promises, once through on this GPU: `python3 -m tools.smoke_inductor [WORD...]`.

A process that compiled before compiles again without measuring (without PyTorch's own caches: no product); a template
that computes something else is never chosen, one that crashes or hangs costs a process of its own and nothing else;
convolution and flexible attention compile and are right; on a GPU without a model PyTorch chooses by itself; choosing
takes milliseconds. Every line ends with yes or NO.
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


class _Measured:
    """How often the compiler timed choices, of products and of other kernels; its own counter is restored with what it
    takes from its caches."""

    count = others = 0

    @classmethod
    def watch(cls) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
        from torch._inductor.select_algorithm import AlgorithmSelectorCache

        for owner, name, counter in ((AlgorithmSelectorCache, "benchmark", "count"),
                                     (CachingAutotuner, "autotune_to_one_config", "others")):  # fmt: skip
            setattr(owner, name, cls._counted(getattr(owner, name), counter))

    @classmethod
    def _counted(cls, timed: Callable[..., Any], counter: str) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            setattr(cls, counter, getattr(cls, counter) + 1)
            return timed(*given, **named)

        return counted


def _model(x: Any, w: Any, b: Any) -> Any:
    y = torch.nn.functional.gelu(torch.addmm(b, x, w.T))
    return torch.nn.functional.layer_norm(y, y.shape[-1:]) @ w


def _compiled(records: Path, caches: bool) -> tuple[int, int]:
    """Compile and run a small model in this process; how many products and other kernels were measured."""
    import torch._inductor.config as config

    shapes = ((1500, 768), (3072, 768), (3072,))
    generator = torch.Generator(device="cuda").manual_seed(1)
    x, w, b = (torch.randn(*s, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.1 for s in shapes)
    with torch.no_grad(), config.patch(force_disable_caches=not caches), tilewise.inductor.enable(records=records):
        got, want = torch.compile(_model)(x, w, b), _model(x, w, b)
    error = ((got - want).float().norm() / want.float().norm()).item()
    if not error < 2e-2:
        raise RuntimeError(f"differs by {error}")
    return _Measured.count, _Measured.others


def in_a_process(records: Path, caches: bool, where: Path) -> tuple[int, int, float]:
    start = time.monotonic()
    given = [sys.executable, "-m", "tools.smoke_inductor", "--one", str(records), str(int(caches))]
    done = subprocess.run(given, check=True, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(where)})  # fmt: skip
    products, others = map(int, done.stdout.split()[-2:])
    return products, others, time.monotonic() - start


def no_measurement_in_a_second_process() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        records, where = Path(folder) / "records", Path(folder) / "cache"
        first = in_a_process(records, True, where)
        cached, remembered = in_a_process(records, True, where), in_a_process(records, False, Path(folder) / "other")
    print("  measured products, others, seconds: first", first, "with PyTorch's caches", cached, "without", remembered)
    return first[0] > 0 and cached[:2] == (0, 0) and remembered[0] == 0


def _spoiled_bmm(how: str, batch: int, most: int = 64, isolated: bool = False) -> tuple[Any, int, int, bool]:
    """Compile a batched product whose templates have a fault: what the report says of it, how many templates were
    changed, how many could be timed, and whether the result is right."""
    import torch._inductor.config as config

    a, b = (torch.randn(batch, 512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    patches = {"force_disable_caches": True, "max_autotune_subproc_result_timeout_seconds": 30.0}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), config.patch(patches):
        torch._dynamo.reset()
        start = time.monotonic()
        enabled = tilewise.inductor.enable(records=Path(folder), isolated=isolated)
        with enabled, spoiled(how, most) as changed:
            got = torch.compile(torch.bmm)(a, b)
        want, spent = torch.bmm(a, b), time.monotonic() - start
        (row,) = report(Path(folder)).rows
        with Store(enabled.advisor.log.store_file, create=False) as store:
            timed = sum("library" not in key for batch in store.batches(store.kernels()[0]) for key in batch.runtime_ns)
    error = ((got - want).float().norm() / want.float().norm()).item()
    print(f"  chose {row.selected} of {row.considered} in {row.seconds * 1e3:.2f} ms")
    print(f"  {len(changed)} of {row.selected - 1} templates: each {how}; {timed} timed, chosen {row.fastest}, "
          f"differs by {error:.1e}, {spent:.1f} s, {enabled.advisor.notes}", flush=True)  # fmt: skip
    return row, len(changed), timed, error < 2e-2


def a_wrong_template_is_never_chosen() -> bool:
    row, changed, _, right = _spoiled_bmm("is wrong", 40)
    return bool(changed) and row.fastest == "ATen" and right


def a_template_that_crashes_costs_nothing_but_itself() -> bool:
    """Tried in a process of its own: this one still computes, and the next product is measured as ever."""
    row, changed, _, right = _spoiled_bmm("crashes", 41, isolated=True)
    then, _, timed, fine = _spoiled_bmm("crashes", 42, most=0, isolated=True)
    return bool(changed) and row.fastest == "ATen" and right and fine and timed == then.selected - 1


def a_template_that_hangs_costs_nothing_but_itself() -> bool:
    row, changed, timed, right = _spoiled_bmm("hangs", 43, most=1, isolated=True)
    return changed == 1 and timed == row.selected - 2 and right


def convolution_and_attention_are_right() -> bool:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    image, weight = torch.randn(16, 64, 56, 56, device="cuda"), torch.randn(128, 64, 3, 3, device="cuda")
    image, weight = (x.to(torch.bfloat16, memory_format=torch.channels_last) for x in (image, weight))
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
        "flex": (flex_attention, (q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v)),
        "convolution": (torch.conv2d, (image, weight), torch.conv2d(image, weight)),
    }
    fine = True
    for name, (call, inputs, want) in cases.items():
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            torch._dynamo.reset()
            before, start = _Measured.count, time.monotonic()
            with tilewise.inductor.enable(records=Path(folder)) as enabled:
                got = torch.compile(call)(*inputs)
            error = ((got - want).float().norm() / want.float().norm()).item()
            print(f"  {name}: differs by {error:.1e}, {time.monotonic() - start:.1f} s, measured "
                  f"{_Measured.count - before}, notes {enabled.advisor.notes}")  # fmt: skip
            fine &= error < 2e-2 and not enabled.advisor.notes
    return fine


def what_has_no_model_is_not_searched() -> bool:
    """A product of float32 and one that adds to a batch: PyTorch's default, which measures nothing."""
    a, b = torch.randn(512, 768, device="cuda"), torch.randn(768, 640, device="cuda")
    c, d, e = (torch.randn(8, 256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    fine = True
    for call, inputs in ((torch.mm, (a, b)), (torch.baddbmm, (c, d, e))):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            torch._dynamo.reset()
            before, start = _Measured.count, time.monotonic()
            with tilewise.inductor.enable(records=Path(folder)) as enabled:
                got, want = torch.compile(call)(*inputs), call(*inputs)
            error, measured = ((got - want).float().norm() / want.float().norm()).item(), _Measured.count - before
            print(f"  {call.__name__}: differs by {error:.1e}, {time.monotonic() - start:.1f} s, measured {measured}")
            fine &= error < 2e-2 and not measured and not enabled.advisor.notes
    return fine


def another_gpu_is_left_to_pytorch() -> bool:
    import torch._inductor.config as config

    before, real = config.save_config_portable(), torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *_: (8, 9)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            active = tilewise.inductor.enable().active
    finally:
        torch.cuda.get_device_capability = real
    print("  said:", [str(one.message) for one in told])
    return not active and len(told) == 1 and config.save_config_portable() == before


def choosing_takes_milliseconds() -> bool:
    from tools.choosing_time import report

    return report() < 2.0


def main() -> int:
    _Measured.watch()
    if sys.argv[1:2] == ["--one"]:
        print(*_compiled(Path(sys.argv[2]), bool(int(sys.argv[3]))))
        return 0
    failed, asked = 0, sys.argv[1:]
    for promise in (choosing_takes_milliseconds, another_gpu_is_left_to_pytorch,
                    what_has_no_model_is_not_searched, a_wrong_template_is_never_chosen,
                    convolution_and_attention_are_right, no_measurement_in_a_second_process,
                    a_template_that_crashes_costs_nothing_but_itself,
                    a_template_that_hangs_costs_nothing_but_itself):  # fmt: skip
        if asked and not any(word in promise.__name__ for word in asked):
            continue
        kept = False
        try:
            with contextlib.suppress(KeyboardInterrupt):
                kept = promise()
        except Exception:
            print(traceback.format_exc()[-2500:])
        failed += not kept
        print(f"{promise.__name__.replace('_', ' ')}: {'yes' if kept else 'NO'}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
