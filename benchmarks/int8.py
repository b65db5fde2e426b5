"""INT8 compared with ONNX Runtime and PyTorch: the bare integer product, and whole networks.

    python -m benchmarks.int8 [products] [networks] [--threads 1] [--json benchmarks/results/int8.json]

ONNX Runtime runs its best of QDQ and QOperator (U8S8, per channel), PyTorch its FX quantization for x86, all calibrated
on the same images. Results are checked against float before they are timed. A ratio above 1 means tilewise is faster
than the fastest peer in the row. The rows "to float32" set int8 against tilewise's own float32: with Winograd
convolutions, which take one multiplication where the direct sum, and int8, take four; and with direct ones.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import tilewise
from benchmarks import onnx_models, torch_models
from benchmarks.harness import Row, compare, without_winograd, write_results
from tilewise import Tensor, models, no_grad
from tilewise.backend import matmul_native, use_backend
from tilewise.quantize import quantize
from tilewise.quantize.layers import INT32, packed_layer

PRODUCTS = [
    *((n, n, n) for n in (256, 511, 512, 1000, 1024, 2048, 2051)),
    *((3136, 64, 576), (128, 512, 1024), (512, 2048, 768)),
]
NETWORKS = [("vgg6", 32), ("vgg6", 1), ("resnet8", 32), ("resnet8", 1)]


def product(m: int, n: int, k: int, threads: int) -> list[Row]:
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 128, (m, k), dtype=np.uint8), rng.integers(-127, 128, (n, k), dtype=np.int8)
    padded = np.pad(x, ((0, 0), (0, -k % 4)))  # our rows are whole groups of four bytes
    kernel = packed_layer(w[:, None, None, :], np.zeros(n, np.int32), np.ones(n), None)
    if not np.array_equal(kernel.linear(padded, INT32, None, False), x.astype(np.int32) @ w.T.astype(np.int32)):
        raise SystemExit("the integer product is wrong")
    left, right = torch.from_numpy(x.view(np.int8)), torch.from_numpy(np.ascontiguousarray(w.T))
    a, b = x.astype(np.float32), np.ascontiguousarray(w.T.astype(np.float32))
    ours = lambda: kernel.linear(padded, INT32, None, False)  # noqa: E731
    return [
        compare(f"{m}×{n}×{k}", threads, {"tilewise": ours, "torch._int_mm": lambda: torch._int_mm(left, right)}, 0.7),
        compare(f"{m}×{n}×{k}, to float32", threads, {"tilewise": ours, "float32": lambda: matmul_native(a, b)}, 0.7),
    ]


class Images:
    def __init__(self, x: np.ndarray) -> None:
        self.batches = iter([{"x": x}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)


def onnx_sessions(model: Any, x: np.ndarray, threads: int) -> dict[str, Any]:
    """ONNX Runtime's two int8 forms of the model; none where it is not installed."""
    if not onnx_models.HERE:
        return {}
    import onnx
    import onnxruntime
    from onnxruntime import quantization

    sessions = {}
    with tempfile.TemporaryDirectory() as folder:
        raw, plain = Path(folder) / "raw.onnx", Path(folder) / "plain.onnx"
        onnx.save(onnx_models.proto(model, x.shape), raw)
        quantization.quant_pre_process(raw, plain)
        for form in (quantization.QuantFormat.QDQ, quantization.QuantFormat.QOperator):
            path = Path(folder) / f"{form}.onnx"
            quantization.quantize_static(
                plain,
                path,
                Images(x),
                quant_format=form,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
            )
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            sessions[f"onnxruntime {form}"] = onnxruntime.InferenceSession(path.read_bytes(), options)
    return sessions


def torch_fx(name: str, model: Any, x: np.ndarray) -> torch.nn.Module:
    """PyTorch's FX quantization of the same weights, for its x86 engine."""
    peer = torch_models.ResNet8() if name == "resnet8" else torch_models.vgg6()
    peer.load_state_dict({key: torch.from_numpy(np.array(t.data)) for key, t in model.named_tensors()})
    images = torch.from_numpy(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation notices of the module itself
        prepared = prepare_fx(peer.eval(), get_default_qconfig_mapping("x86"), (images,))
        prepared(images)
        return convert_fx(prepared)


def check_close(who: str, result: np.ndarray, exact: np.ndarray) -> None:
    if np.abs(result - exact).max() > 0.1 * np.abs(exact).max():
        raise SystemExit(f"{who}: int8 strays from float")


def network(name: str, batch: int, threads: int) -> list[Row]:
    model = getattr(models, name)().eval()
    x = np.random.default_rng(0).standard_normal((batch, 3, 32, 32)).astype(np.float32)
    int8, tensor = quantize(model, [x]), Tensor(x)
    fx, channels_last = torch_fx(name, model, x), torch.from_numpy(x).to(memory_format=torch.channels_last)
    sessions = onnx_sessions(model, x, threads)

    def direct() -> Any:
        with without_winograd():
            return model(tensor)

    with no_grad(), torch.inference_mode():
        exact = model(tensor).data
        peers = {form: (lambda s=session: s.run(None, {"x": x})) for form, session in sessions.items()}
        check_close(f"tilewise {name}", int8(tensor).data, exact)
        check_close(f"pytorch {name}", fx(channels_last).numpy(), exact)
        for form, run in peers.items():
            check_close(f"{form} {name}", run()[0], exact)
        peers["pytorch fx"] = lambda: fx(channels_last)
        case, ours = f"{name} batch {batch}", lambda: int8(tensor)
        return [
            compare(case, threads, {"tilewise": ours, **peers}, 2.0),
            compare(f"{case}, to float32", threads, {"tilewise": ours, "float32": lambda: model(tensor)}, 2.0),
            compare(f"{case}, to float32 without Winograd", threads, {"tilewise": ours, "float32 direct": direct}, 2.0),
        ]


def digits_cnn(threads: int) -> Row:
    """The trained CNN at batch 64 against the same in float32 on the NumPy backend."""
    model, x = models.pretrained("cnn"), tilewise.data.digits().x_test[:64]
    int8, tensor = quantize(model, [x]), Tensor(x)

    def plain() -> Any:
        with use_backend("numpy"):
            return model(tensor)

    with no_grad():
        return compare(
            "digits cnn batch 64, to NumPy", threads, {"tilewise": lambda: int8(tensor), "numpy": plain}, 1.0
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], "products", "networks"], help="what to measure (all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/int8.json"))
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # ONNX Runtime's advice on models that need preparing
    tilewise.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    parts, rows = options.parts or ["products", "networks"], list[Row]()
    if "products" in parts:
        rows += [row for shape in PRODUCTS for row in product(*shape, options.threads)]
    if "networks" in parts:
        rows += [row for case in NETWORKS for row in network(*case, options.threads)]
        rows.append(digits_cnn(options.threads))
    write_results(options.json, rows, keep=bool(options.parts))


if __name__ == "__main__":
    main()
