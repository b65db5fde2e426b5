"""Training TileRanker on a GPU compared with CPU threads of the same machine: seconds, errors and the GPU's profile.

    python -m benchmarks.train_devices --threads 8                        # 2,000 synthetic TPU kernels, about 3 minutes
    python -m benchmarks.train_devices --kernels 200 --threads 2          # without a GPU: only the CPU's times

Both devices train with the default settings for that number of kernels, the same kernels and the same number of steps;
features are prepared once, before the clock starts. "Steps" leaves out validation, "whole run" includes copying the
collection, capturing the step and validation. The profile counts the GPU's kernels in a step, which decide its time:
most take a microsecond.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import today
from course.synthetic_tiles import synthetic_dataset
from tilewise import _system
from tilewise._atomic import write_atomic
from tilewise._extension import native
from tilewise.costmodel.data.dataset import Dataset
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.training.config import WINNERS, TrainSettings, budget, default_settings
from tilewise.costmodel.training.device_epochs import DeviceEpochs, PaddedBatch
from tilewise.costmodel.training.loop import TrainingRun, _faster_run, train
from tilewise.costmodel.training.sampling import prepared_inputs

RESULTS = Path(__file__).parent / "results" / "train_devices.json"
_PROFILED_STEPS, _LISTED_KERNELS, _FEW_STEPS = 20, 20, 100
_WIDE_STEPS = {"cpu": 60, "cuda": 334}  # of the recipe `winners`, whose steps take the CPU twenty times as long


class Bfloat16Epochs(DeviceEpochs):
    """Steps whose products read bfloat16 instead of TF32."""

    def _scores(self, batch: PaddedBatch) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            scores: Tensor = self.run.module(batch)
        return scores.float()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_per_1000_steps(data: Dataset, settings: TrainSettings, device: str, steps: int, **kinds: Any) -> float:
    """Return the median over three epochs after a first one, which fills caches and captures the GPU's step."""
    run, seconds = TrainingRun(data, settings, device, None), []
    run.step_limit = steps
    for kind in kinds.values():
        run.device_epochs = kind(run)
    for epoch in range(4):
        synchronize(device)
        started, before = time.perf_counter(), run.optimizer.step_count
        run._train_epoch(epoch)
        synchronize(device)
        seconds.append((time.perf_counter() - started) * 1000 / (run.optimizer.step_count - before))
    return statistics.median(seconds[1:])


def whole_run(data: Dataset, settings: TrainSettings, device: str) -> dict[str, float]:
    """Train once and return the seconds, and the errors in per cent on the valid and test kernels."""
    synchronize(device)
    started = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        model: Any = train(data, settings, device=device)
    row = {"seconds": time.perf_counter() - started}
    for split in ("valid", "test"):
        scored = [(kernel.target, model.score(kernel)) for kernel in getattr(data, split)]
        for k in (1, 5):
            row[f"{split} top-{k}"] = 100 * statistics.fmean(top_k_error(target, s, k) for target, s in scored)
    return row


def stages(data: Dataset, settings: TrainSettings, device: str) -> dict[str, float]:
    """Return the seconds of a run's stages besides its steps: they bound the ratio of whole runs."""
    times: dict[str, float] = {}

    def timed(name: str, call: Any) -> Any:
        started = time.perf_counter()
        result = call()
        synchronize(device)
        times[name] = round(time.perf_counter() - started, 4)
        return result

    run = timed("create run", lambda: TrainingRun(data, settings, device, None))
    run.step_limit = 1
    timed("copy kernels", lambda: run.device_epochs)
    timed("first step, with capture", lambda: run._train_epoch(0))
    timed("first validation", run._validate)
    timed("validation", run._validate)
    timed("finish, with calibration", run.finish)
    return times


def profile_steps(data: Dataset, settings: TrainSettings) -> dict[str, Any]:
    """Profile some steps on the GPU: kernels and busy microseconds of a step, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    run = TrainingRun(data, settings, "cuda", None)
    run.step_limit = _PROFILED_STEPS
    run._train_epoch(0)
    synchronize("cuda")
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as result:
        run._train_epoch(1)
        synchronize("cuda")
    count, busy = Counter[str](), dict[str, float]()
    for event in result.events():
        if event.device_type.name == "CUDA":
            count[event.name] += 1
            busy[event.name] = busy.get(event.name, 0.0) + event.time_range.elapsed_us()
    # The host enqueues steps without waiting for the GPU: only its own time is left.
    started = time.perf_counter()
    for _ in zip(range(_PROFILED_STEPS), run.device_epochs.epoch(0, 2) if run.device_epochs else (), strict=False):
        pass
    host = (time.perf_counter() - started) / _PROFILED_STEPS
    synchronize("cuda")
    longest = [
        {"kernel": name[:110], "per step": count[name] / _PROFILED_STEPS, "us per step": us / _PROFILED_STEPS}
        for name, us in sorted(busy.items(), key=lambda item: -item[1])[:_LISTED_KERNELS]
    ]
    return {
        "kernels per step": count.total() / _PROFILED_STEPS,
        "busy us per step": sum(busy.values()) / _PROFILED_STEPS,
        "host us per step": 1e6 * host,
        "longest": longest,
    }


def measure(data: Dataset, devices: list[str]) -> dict[str, Any]:
    """Measure every device, and on a GPU the alternatives and the profile."""
    settings = default_settings("TileRanker", **budget("TileRanker", len(data.train), has_estimate=True))
    wide = default_settings("TileRanker", **WINNERS)
    record: dict[str, Any] = {"steps": {}, "wide steps": {}, "stages": {}, "run": {}}
    threads = torch.get_num_threads()
    # More threads need not be faster: a step is a few milliseconds.
    for fewer in (1, threads // 2):
        torch.set_num_threads(fewer)
        record["steps"][f"cpu, {fewer} threads"] = seconds_per_1000_steps(data, settings, "cpu", _FEW_STEPS)
    torch.set_num_threads(threads)
    for device in devices:
        record["steps"][device] = seconds_per_1000_steps(data, settings, device, 334)
        record["wide steps"][device] = seconds_per_1000_steps(data, wide, device, _WIDE_STEPS[device])
        record["stages"][device] = stages(data, settings, device)
        record["run"][device] = whole_run(data, settings, device)
        print(device, {key: row[device] for key, row in record.items()}, flush=True)
    if "cuda" in devices:
        record["steps"]["cuda, bfloat16"] = seconds_per_1000_steps(data, settings, "cuda", 334, kind=Bfloat16Epochs)
        record["wide steps"]["cuda, bfloat16"] = seconds_per_1000_steps(data, wide, "cuda", 334, kind=Bfloat16Epochs)
        record["auto"] = _faster_run(TrainingRun(data, settings, "cuda", None), progress=True).device
        record["profile"] = profile_steps(data, settings)
    return record


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--kernels", type=int, default=2000)
    flags.add_argument("--threads", type=int, default=8)
    flags.add_argument("--out", type=Path, default=RESULTS)
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    data = synthetic_dataset(options.kernels, options.kernels // 20, options.kernels // 10, 11, 120)
    started = time.perf_counter()
    inputs = prepared_inputs(data.train, "ranker")
    for index in range(len(inputs)):
        inputs.inputs(index)
    seconds = time.perf_counter() - started
    print(f"{options.kernels} kernels, features in {seconds:.1f} s, compiled kernels: {native is not None}", flush=True)
    names = {"cpu": f"{_system.cpu_name()}, {options.threads} threads"}
    if "cuda" in devices:
        names["cuda"] = torch.cuda.get_device_name()
    record: dict[str, Any] = {"date": today(), "torch": torch.__version__, "compiled kernels": native is not None}
    record |= {"machine": names, "kernels": options.kernels} | measure(data, devices)
    write_atomic(options.out, json.dumps(record, indent=1) + "\n")
    for longest in record.get("profile", {}).pop("longest", []):
        print(f"{longest['per step']:7.2f} x {longest['us per step']:8.2f} us  {longest['kernel']}")
    print(record.get("profile", ""), "auto:", record.get("auto", ""))
    for title in ("steps", "wide steps"):
        rows = {name: round(seconds, 3) for name, seconds in record[title].items()}
        ratio = record[title]["cpu"] / record[title].get("cuda", float("nan"))
        print(f"seconds per 1,000 {title}: {rows}, ratio {ratio:.2f}")
    for device, row in record["run"].items():
        print(f"whole run on {device}: " + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    if "cuda" in devices:
        print(f"whole run, ratio {record['run']['cpu']['seconds'] / record['run']['cuda']['seconds']:.2f}")


if __name__ == "__main__":
    main()
