"""Networks that nothing here was made for: timm's, as PyTorch exports them, compared with ONNX Runtime and OpenVINO.

    python -m benchmarks.others [--only cspdarknet53 levit_128s] [--threads 1] [--budget 1]

Weights are random; every runtime gets the same file, in float32, batch 1, at the size the network is made for (at most
256 pixels a side, where it takes another). Next to the times: how far the plan's result lies from ONNX Runtime's, as a
share of the largest, and in how many calls it runs. timm is no dependency of tilewise: `pip install timm` in an
environment of its own, since it brings a PyTorch of its own choice.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilewise
import tilewise.onnx
import tilewise.plan
from benchmarks.harness import Row, compare, write_results
from benchmarks.networks import errors, onnx_runtime, open_vino
from tilewise.errors import TilewiseError

# One of each family that timm 1.0.30 has and that `benchmarks.networks` has not; not chosen by how they come out.
NETWORKS = (
    "mobilevit_xs", "ghostnet_100", "edgenext_xx_small", "poolformer_s12", "mixer_s16_224", "coatnet_nano_rw_224",
    "levit_128s", "pit_ti_224", "hrnet_w18_small", "cspdarknet53", "dla34", "res2net50_26w_4s", "vovnet39a",
    "swin_tiny_patch4_window7_224", "inception_v3", "xception41", "nf_regnet_b0", "tinynet_a", "mobilenetv4_conv_small",
    "efficientvit_b0", "fastvit_t8", "repvit_m1", "tf_efficientnetv2_b0", "regnety_002", "deit3_small_patch16_224",
    "convnextv2_atto", "maxvit_rmlp_pico_rw_256", "eca_nfnet_l0", "resnest14d", "skresnet18", "selecsls42b",
    "lcnet_050", "hardcorenas_a", "spnasnet_100", "rexnet_100", "gernet_s", "visformer_tiny", "crossvit_9_240",
    "xcit_nano_12_p16_224", "cait_xxs24_224", "tresnet_m", "sequencer2d_s", "gmlp_s16_224", "resmlp_12_224",
    "focalnet_tiny_srf", "starnet_s1", "inception_next_atto", "mambaout_femto",
)  # fmt: skip
_MOST_PIXELS = 256


def exported(timm: Any, name: str, folder: Path) -> tuple[Path, np.ndarray]:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, exportable=True).eval()
    size, fixed = model.default_cfg["input_size"][-1], model.default_cfg.get("fixed_input_size")
    x = torch.randn(1, 3, *[size if fixed else min(size, _MOST_PIXELS)] * 2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and not weight.any():  # a head that starts with nothing would say nothing
                weight.normal_(std=0.02)
    path = folder / "network.onnx"
    torch.onnx.export(model, (x,), str(path), opset_version=17, dynamo=False)
    return path, x.numpy()


def race(timm: Any, name: str, threads: int, budget_s: float) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path, x = exported(timm, name, Path(folder))
        plan = tilewise.plan.compile(tilewise.onnx.load(path), x)
        runs = {
            "tilewise": lambda: plan(x),
            "onnxruntime": onnx_runtime(path, x, threads),
            **open_vino(path, x, threads),
        }
        off = errors(runs, np.asarray(runs["onnxruntime"]()))
        row = compare(f"{name} {x.shape[-1]} px", threads, runs, budget_s)
    print(f"    off by {off['tilewise']:.1e}, {plan.native_calls} calls", flush=True)
    return replace(row, errors=off)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=NETWORKS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a row")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "others.json")
    options = parser.parse_args()
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"timm cannot be used: {error}") from None
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tilewise.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    ratios = {}
    for name in options.only:
        try:
            row = race(timm, name, options.threads, options.budget)
        except TilewiseError as error:
            print(f"{name}: {str(error)[:160]}", flush=True)
            continue
        ratios[name] = row.ratio
        write_results(options.json, [row], keep=True)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        worst = min(ratios, key=lambda name: ratios[name])
        print(f"{len(ratios)} of {len(options.only)} networks: {mean:.2f}, {worst} {ratios[worst]:.2f}")


if __name__ == "__main__":
    main()
