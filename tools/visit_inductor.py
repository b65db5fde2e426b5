"""What PyTorch's compiler measures on this GPU: `python3 -m tools.visit_inductor --out DIR --seconds 200`.

Each product is compiled once with a random part of the exhaustive template space; the feedback hook writes every
choice with its time, one JSON object a line.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import time
import traceback
from pathlib import Path
from typing import Any

# op, sizes ((batch), m, n, k), dtype
PROBLEMS = [
    ("mm", (4096, 4096, 4096), "bf16"), ("addmm", (16, 4096, 11008), "bf16"), ("mm", (512, 3072, 768), "bf16"),
    ("mm", (8, 14336, 4096), "fp16"), ("addmm", (2048, 1024, 4096), "fp16"), ("bmm", (96, 512, 512, 64), "bf16"),
    ("mm", (64, 2048, 8192), "bf16"), ("addmm", (8192, 768, 3072), "bf16"), ("mm", (1000, 1000, 1000), "bf16"),
    ("bmm", (64, 128, 1024, 128), "fp16"), ("mm", (256, 12288, 2048), "bf16"), ("addmm", (197, 3072, 768), "bf16"),
    ("mm", (2500, 1027, 515), "bf16"), ("bmm", (24, 1024, 64, 1024), "bf16"), ("mm", (128, 128, 32768), "bf16"),
    ("addmm", (1024, 5120, 1280), "bf16"), ("mm", (3000, 640, 2560), "fp16"), ("bmm", (8, 768, 768, 768), "bf16"),
    ("mm", (32, 1536, 6144), "bf16"), ("addmm", (4096, 2304, 768), "fp16"), ("mm", (6144, 1024, 1024), "bf16"),
    ("mm", (777, 2048, 999), "bf16"), ("bmm", (192, 197, 197, 64), "bf16"), ("addmm", (1, 4096, 4096), "bf16"),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--choices", type=int, default=44)
    given = parser.parse_args()
    started = time.monotonic()
    import torch
    import torch._inductor.config as config
    from torch._inductor import select_algorithm
    from torch._inductor.choices import InductorChoices

    print("torch", torch.__version__, "feedback", inspect.signature(select_algorithm.add_feedback_saver),
          inspect.signature(InductorChoices._finalize_template_configs), flush=True)  # fmt: skip
    out = (given.out / "inductor.jsonl").open("w")
    chance = random.Random(0)
    state: dict[str, Any] = {}

    class Sampling(InductorChoices):
        def _finalize_template_configs(self, template_choices, kernel_inputs, templates, op_name, kwarg_overrides=None):  # type: ignore[no-untyped-def]
            start = time.perf_counter()
            every = {uid: list(found) for uid, found in template_choices.items()}
            spent = time.perf_counter() - start
            kept = []
            counts = {}
            for uid, found in every.items():
                counts[uid] = len(found)
                triton = [c for c in found if "BLOCK_M" in c.params.to_kwargs()]
                kept += [c for c in found if "BLOCK_M" not in c.params.to_kwargs()]
                good = [c for c in triton if _plausible(c.params.to_kwargs())]
                kept += chance.sample(good, min(len(good), given.choices // (2 if len(every) > 2 else 1)))
            first = next((c for f in every.values() for c in f if "BLOCK_M" in c.params.to_kwargs()), None)
            state.update(counts=counts, enumerate_s=spent, op_name=op_name)
            if "shown" not in state and first is not None:
                state["shown"] = True
                print("kwargs", first.params.to_kwargs(), "extra", first.extra_kwargs, "uid", list(every), flush=True)
            return kept

    def save(timings, name, input_nodes, choices, profiled, precompile_times):  # type: ignore[no-untyped-def]
        rows = []
        for choice, seconds in timings.items():
            ktc = getattr(choice, "annotations", {}).get("ktc")
            kwargs = ktc.params.to_kwargs() if ktc is not None else {}
            numbers = {key: value for key, value in kwargs.items() if isinstance(value, (int, str, bool))}
            rows.append([getattr(getattr(ktc, "template", None), "uid", ""), choice.name, numbers, seconds,
                         precompile_times.get(choice)])  # fmt: skip
        nodes = [[[int(s) for s in node.get_size()], [int(s) for s in node.get_stride()], str(node.get_dtype())]
                 for node in input_nodes]  # fmt: skip
        record = {"name": name, "nodes": nodes, "counts": state.get("counts"), "rows": rows, **state["problem"],
                  "enumerate_s": state.get("enumerate_s"), "op_name": state.get("op_name")}  # fmt: skip
        out.write(json.dumps(record) + "\n")
        out.flush()
        finite = sorted((row for row in rows if row[3] != float("inf")), key=lambda row: row[3])
        aten = [row[3] for row in finite if not row[2]]
        best = finite[0]
        print(f"{state['problem']} {len(finite)}/{len(rows)} best {best[0]} {best[3]:.4f} {best[2]} aten {aten} "
              f"counts {state.get('counts')}", flush=True)  # fmt: skip

    select_algorithm.add_feedback_saver(save)
    config.inductor_choices_class = Sampling
    torch.set_float32_matmul_precision("high")
    calls = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm}
    patches = {"max_autotune_gemm": True, "max_autotune_gemm_search_space": "EXHAUSTIVE", "force_disable_caches": True,
               "triton.enable_persistent_tma_matmul": True, "max_autotune_gemm_backends": "ATEN,TRITON"}  # fmt: skip
    for op, sizes, dtype in PROBLEMS:
        if time.monotonic() - started > given.seconds - 15:
            print("out of time", flush=True)
            break
        *batch, m, n, k = sizes
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        a = torch.randn(*batch, m, k, device="cuda", dtype=kind)
        b = torch.randn(*batch, n, k, device="cuda", dtype=kind).mT
        extra = (torch.randn(n, device="cuda", dtype=kind),) if op == "addmm" else ()
        state["problem"] = {"op": op, "sizes": list(sizes), "dtype": dtype}
        start = time.monotonic()
        try:
            torch._dynamo.reset()
            with config.patch(patches):
                got = torch.compile(calls[op], dynamic=False)(*extra, a, b)
            want = calls[op](*extra, a, b)
            print(f"{op} {sizes}: {time.monotonic() - start:.1f} s, differs by "
                  f"{((got - want).float().norm() / want.float().norm()).item():.1e}", flush=True)  # fmt: skip
        except Exception:
            print(op, sizes, traceback.format_exc()[-1500:], flush=True)
    return 0


def _plausible(of: dict[str, Any]) -> bool:
    """Fits shared memory, keeps its accumulator in registers and a thread busy."""
    rows, cols, depth = of["BLOCK_M"], of["BLOCK_N"], of["BLOCK_K"]
    warps, stages = of["num_warps"], of["num_stages"]
    per_thread = rows * cols / (32 * warps)
    return 4 <= per_thread <= 128 and (rows + cols) * depth * 2 * max(stages, 1) <= 200 * 1024 and stages >= 2


if __name__ == "__main__":
    raise SystemExit(main())
