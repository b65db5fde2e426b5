"""Configurations for serving kernels: routing tables, choices on any GPU, and files in vLLM's format."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from tilewise.cli.app import command_line
from tilewise.costmodel.data.importers.stream import open_sources
from tilewise.costmodel.data.importers.vllm import parse_file_name, read_rows
from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.gpu.devices import DEVICES
from tilewise.gpu.families.family import get_family
from tilewise.gpu.families.grouped import default_config
from tilewise.gpu.measure.triton_device import TritonDevice
from tilewise.gpu.serving import (
    ServingRanker,
    ServingShape,
    candidates,
    device_named,
    shipped_serving_ranker,
    write_file,
)
from tilewise.io import save
from tilewise.tune.choose.tuner import Tuner

MOE, BLOCK = ServingShape(768, experts=128), ServingShape(4096, 7168, dtype="fp8_w8a8", block_scaled=True)


def test_rows_are_sorted_by_expert_and_padded_to_whole_blocks() -> None:
    torch = pytest.importorskip("torch")
    from tilewise.gpu.families.grouped import sort_by_expert

    routes = torch.tensor([2, 0, 2, 2, 1, 0, 2, 2])
    slots, experts = sort_by_expert(torch, routes, 4, 4)
    assert experts.tolist() == [0, 1, 2, 2]  # expert 3 has no rows and no block
    assert slots.reshape(4, 4).tolist() == [[1, 5, 8, 8], [4, 8, 8, 8], [0, 2, 3, 6], [7, 8, 8, 8]]


def test_the_tuner_ranks_grouped_products_by_the_serving_ranker_and_claims_nothing(tmp_path: Path) -> None:
    details = {"name": "NVIDIA H200", "compute_capability": 90}
    tuner = Tuner(TritonDevice(SimpleNamespace(describe=lambda: details)), cache=tmp_path)
    spec = {"family": "grouped_matmul", "tokens": 64, "top_k": 8, "experts": 128, "n": 1536, "k": 2048}
    decision = tuner.choose(spec)
    assert decision.config == shipped_serving_ranker().choose(MOE, 64, device_named("NVIDIA H200"))
    assert decision.source == "model" and not decision.within5


def test_a_grouped_problem_is_checked() -> None:
    family = get_family("grouped_matmul")
    spec = {"family": "grouped_matmul", "tokens": 64, "top_k": 2, "experts": 8, "n": 256, "k": 512}
    problem = family.problem(spec)
    assert family.configs(problem)[0] == default_config(64, 8, False)
    for wrong in ({"n": 100}, {"top_k": 9}, {"dtype": "fp8"}, {"scales": "block"}):
        with pytest.raises(ConfigurationError):
            family.problem({**spec, **wrong})
    block = get_family("block_fp8_matmul").problem({"family": "block_fp8_matmul", "m": 64, "n": 256, "k": 512})
    assert max(config.size("block_k") for config in family.configs(block)) == 128  # one scale per step


@pytest.mark.parametrize("shape", [MOE, BLOCK], ids=["moe", "block"])
def test_every_device_gets_a_configuration_that_fits(shape: ServingShape) -> None:
    for device in DEVICES:
        choice = shipped_serving_ranker().choose(shape, 64, device)
        assert choice in candidates(shape, device, default_config(64, shape.experts, shape.block_scaled))


def test_the_first_tiles_differ_and_start_with_the_choice() -> None:
    ranker, device = shipped_serving_ranker(), device_named("NVIDIA H200")
    tiles = ranker.first_tiles(MOE, 64, device)
    assert len({(c.size("block_m"), c.size("block_n"), c.size("block_k")) for c in tiles}) == 5
    assert tiles[0] == ranker.choose(MOE, 64, device)


@pytest.mark.parametrize("device", ["NVIDIA_H200", "AMD_Instinct_MI300X"])
@pytest.mark.parametrize("shape", [MOE, BLOCK], ids=["moe", "block"])
def test_a_written_file_is_read_back_by_the_importer(shape: ServingShape, device: str, tmp_path: Path) -> None:
    path = write_file(shape, device, tmp_path, tokens=(1, 64))
    family, sizes, name = parse_file_name(path.name)
    assert name == device and sizes["n"] == shape.n and family == ("fused_moe" if shape.experts else "block_fp8")
    rows = [row for source in open_sources(path) for row in read_rows(source, pytest.fail)]
    assert [row.sizes["m"] for row in rows] == [1, 64] and all(row.config["num_warps"] for row in rows)
    assert set(json.loads(path.read_text())) == {"1", "64"}


def test_an_unknown_device_and_a_damaged_ranker_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no record of a GPU called 'Voodoo 2'"):
        write_file(MOE, "Voodoo 2", tmp_path)
    save({"other": np.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(FileFormatError, match="not a ranker of serving kernels"):
        ServingRanker(tmp_path / "x.safetensors")


def test_the_command_writes_a_file_per_shape(tmp_path: Path) -> None:
    run, app = CliRunner().invoke, command_line()
    moe = ["tune", "moe", "--experts", "128", "--intermediate", "768", "--intermediate", "384", "--batch-sizes", "16,1"]
    done = run(app, [*moe, "--device-name", "NVIDIA_H200", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    names = sorted(Path(path).name for path in json.loads(done.stdout)["files"])
    assert names == [f"E=128,N={n},device_name=NVIDIA_H200.json" for n in (384, 768)]
    assert list(json.loads((tmp_path / names[0]).read_text())) == ["1", "16"]
    block = ["tune", "block-fp8", "4096x7168", "--batch-sizes", "8", "--device-name", "NVIDIA B200"]
    assert run(app, [*block, "--out", str(tmp_path / "one.json")]).exit_code == 0
    assert list(json.loads((tmp_path / "one.json").read_text())) == ["8"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("moe --intermediate 99999999999999999999 --device-name NVIDIA_H200", "at most 9,999,999"),
        ("moe --intermediate 768 --dtype foo --device-name NVIDIA_H200", "--dtype is one of bf16"),
        ("moe --device-name NVIDIA_H200", "needs --intermediate"),
        ("moe --intermediate 768 --batch-sizes 1,x --device-name NVIDIA_H200", "--batch-sizes is a list"),
        ("matmul 8x8x8 --dtype bf16", "applies to moe and block-fp8 only"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(arguments: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        CliRunner().invoke(command_line(), ["tune", *arguments.split()], catch_exceptions=False)
