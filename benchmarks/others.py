"""Networks that nothing here was made for: timm's, as PyTorch exports them, compared with ONNX Runtime and OpenVINO.

    python -m benchmarks.others [--only cspdarknet53 levit_128s] [--set unseen] [--pixels 193] [--batch 1] [--threads 1]
                                [--files FOLDER]

Weights are random; every runtime gets the same file, in float32, at the size the network is made for (at most 256
pixels a side, where it takes another), or at `--pixels`. Next to the times: the plan's largest difference from ONNX
Runtime's result, as a share of the largest number, its native calls, and its operations outside them. `--files` keeps
the exported files, and uses those that are there. timm is no dependency of tilewise: `pip install --no-deps timm`;
torchvision, which timm imports for training only, may be missing.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import logging
import math
import sys
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
# Of families and kinds of layers that neither the list above nor the documentation has; not chosen by result.
UNSEEN = (
    "regnetx_004", "regnety_004", "inception_v4", "efficientformer_l1", "efficientformerv2_s0", "ghostnetv2_100",
    "swinv2_tiny_window8_256", "convit_tiny", "eva02_tiny_patch14_224", "hiera_tiny_224", "mobilevitv2_050",
    "twins_pcpvt_small", "resnet10t", "hgnetv2_b0", "repghostnet_050", "ese_vovnet19b_dw", "mixnet_s", "resnext26ts",
)  # fmt: skip
SETS = {"families": NETWORKS, "unseen": UNSEEN}
_MOST_PIXELS = 256


class _MissingClass(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> str:
        return _not_special(name)


def _not_special(name: str) -> str:
    if name.startswith("__"):
        raise AttributeError(name)
    return name


class _MissingPackage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of torchvision that are not installed: every name in them is a class."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = lambda name: _MissingClass(_not_special(name), (), {})


def load_timm() -> Any:
    """Import timm, with or without torchvision."""
    sys.meta_path.append(_MissingPackage())  # asked last: an installed torchvision goes first
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"timm cannot be used: {error}") from None
    return timm


def exported(timm: Any, name: str, folder: Path, pixels: int | None, batch: int) -> tuple[Path, np.ndarray]:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, exportable=True).eval()
    size, fixed = model.default_cfg["input_size"][-1], model.default_cfg.get("fixed_input_size")
    x = torch.randn(batch, 3, *[size if fixed else pixels or min(size, _MOST_PIXELS)] * 2)
    path = folder / f"{name}_{batch}_{x.shape[-1]}.onnx"
    if path.exists():
        return path, x.numpy()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and not weight.any():  # a head that starts with nothing would say nothing
                weight.normal_(std=0.02)
    torch.onnx.export(model, (x,), str(path), opset_version=17, dynamo=False)
    return path, x.numpy()


def race(title: str, path: Path, x: np.ndarray, threads: int, budget_s: float) -> Row:
    """Compare the plan of a file with its peers; print where it runs and its difference from ONNX Runtime."""
    plan = tilewise.plan.compile(tilewise.onnx.load(path), x)
    runs = {
        "tilewise": lambda: plan(x),
        "onnxruntime": onnx_runtime(path, x, threads),
        **open_vino(path, x, threads),
    }
    off = errors(runs, np.asarray(runs["onnxruntime"]()))
    row = compare(title, threads, runs, budget_s)
    outside = f"{plan.operations_outside} operations outside" if plan.operations_outside else "one native call"
    print(f"    off by {off['tilewise']:.1e}, {outside}", flush=True)
    return replace(row, errors=off)


def print_mean(ratios: dict[str, float], count: int) -> None:
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        worst = min(ratios, key=lambda name: ratios[name])
        print(f"{len(ratios)} of {count} networks: {mean:.2f}, {worst} {ratios[worst]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=tuple(SETS), default="families")
    parser.add_argument("--only", nargs="+", help="networks, instead of a set")
    parser.add_argument("--pixels", type=int, help="a side, where a network takes any size")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a row")
    parser.add_argument("--files", type=Path, help="folder of exported files")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "others.json")
    options = parser.parse_args()
    timm, names = load_timm(), options.only or SETS[options.set]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tilewise.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    ratios = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path, x = exported(timm, name, options.files or Path(folder), options.pixels, options.batch)
            title = f"{name} {x.shape[-1]} px" + (f", batch {options.batch}" if options.batch > 1 else "")
            try:
                row = race(title, path, x, options.threads, options.budget)
            except TilewiseError as error:
                print(f"{name}: {str(error)[:160]}", flush=True)
                continue
        ratios[name] = row.ratio
        write_results(options.json, [row], keep=True)
    print_mean(ratios, len(names))


if __name__ == "__main__":
    main()
