"""Promises of the importers: every tool's log becomes kernels with the same numbers, and damage is one sentence."""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import interruptible, until
from tilewise.costmodel.data.columns import select_columns
from tilewise.costmodel.data.dataset import load_dataset
from tilewise.costmodel.data.importers import FORMATS, KernelDescription, import_logs, read_description
from tilewise.costmodel.data.importers.build import gpu_name_in
from tilewise.costmodel.data.importers.record_table import LoggedConfigs
from tilewise.costmodel.data.importers.stream import JsonWalker, Source
from tilewise.costmodel.data.importers.vllm import TunedRow, alternatives, read_rows
from tilewise.costmodel.data.schema import NODE_COLUMN, Schema
from tilewise.costmodel.data.shards import read_folder
from tilewise.costmodel.models.scorer import shipped_scorer
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError

SHARED = Path(__file__).parents[5] / "shared" / "data"


def t4(configs=6, failures=2):
    results = [
        {
            "configuration": {"block_size_x": 16 << i, "use_padding": i % 2, "variant": "ab"[i % 2]},
            "times": {"runtimes": [1.0 + i, 1.0 + i, 9.0]},
            "invalidity": "correct",
            "correctness": 1,
        }
        for i in range(configs)
    ]
    broken = {"configuration": {"block_size_x": 7}, "times": {"runtimes": []}, "invalidity": "compile"}
    return json.dumps({"metadata": {"timeunit": "milliseconds"}, "results": results + [broken] * min(failures, 1)})


def cache():
    entries = {
        f"{x}": {"block": x, "time": x / 10, "times": [x / 10, x / 10], "compile_time": 3.0, "GFLOP/s": 5.0}
        for x in (16, 32, 64)
    }
    entries["128"] = {"block": 128, "time": "CompilationFailedConfig", "times": []}
    whole = {"device_name": "RTX", "kernel_name": "vadd", "problem_size": [1000, 20], "tune_params_keys": ["block"]}
    return json.dumps(whole | {"cache": entries})


def autotvm():
    def line(tile, cost, error=0):
        config = {"index": 1, "entity": [["tile_f", "sp", [-1, tile]], ["unroll", "ot", 512]]}
        task = ["cuda -model=v100", "conv2d_nchw.cuda", [["TENSOR", [1, 64, 56, 56], "float32"]], {}]
        return json.dumps({"input": task, "config": config, "result": [[cost], error, 1.0, 2.0], "version": 0.2})

    return "\n".join([line(2, 1e-3), line(4, 2e-3), line(4, 2.2e-3), line(8, 1e9, 4)])


def metaschedule():
    def line(tile, seconds):
        trace = [[["SamplePerfectTile", [], [4], ["x"]], ["EnterPostproc", [], [], []]], [[0, tile]]]
        arguments = [["TENSOR", "float32", [128, 64]], ["TENSOR", "float32", [64, 32]]]
        return json.dumps([0, [trace, [seconds], {"kind": "llvm", "mcpu": "skylake"}, arguments]])

    return "\n".join([json.dumps(["123", "bW9kdWxl"]), line([4, 32], 1e-5), line([8, 16], 2e-5)])


def autoheuristic():
    head = {"shared_memory": 166912, "device_capa": [8, 0], "name": "mm", "numerical_features": ["m", "k", "n"]}
    rows = [json.dumps(head), "m,k,n,mat1_dtype,choice,feedback"]
    for m in (64, 128, 256, 512):
        rows.append(f"{m},4096,1024,torch.float16,extern_mm,0.3")
        for block in (16, 32, 64):
            choice = f"type=triton_BLOCK-M={block}_BLOCK-K=32_BLOCK-N=64_numstages=3_numwarps=4"
            rows.append(f"{m},4096,1024,torch.float16,{choice},{0.1 * block}")
        rows.append(f"{m},4096,1024,torch.float16,type=triton_BLOCK-M=128_BLOCK-K=32_BLOCK-N=64_numwarps=8,inf")
    return "\n".join(rows)


def feedback():
    choices = [[{"BLOCK_M": 64}, 0.5], [{"BLOCK_M": 128}, 0.25], [{"BLOCK_M": 256}, None]]
    return json.dumps({"name": "bmm", "sizes": {"b": 2, "m": 64}, "device": "H100", "choices": choices})


def triton():
    config = {"kwargs": {"BLOCK_M": 64}, "num_warps": 4, "num_stages": 3, "pre_hook": None}
    text = "BLOCK_M: 128, num_warps: 8, num_ctas: 1, num_stages: 2, maxnreg: None"
    return json.dumps(
        {"key": [512, 512, "torch.float16"], "configs_timings": [[config, [0.5, 0.4, 0.6]], [text, 0.25]]}
    )


def helion():
    rows = ["run_id,timestamp_s,config_id,generation,status,perf_ms,compile_time_s,config"]
    for number, (status, perf) in enumerate([("ok", "0.5"), ("ok", "0.25"), ("error", "")]):
        config = f"\"Config(block_sizes=[{16 << number}, 32], num_warps=4, indexing='pointer')\""
        rows.append(f"r1,0.1,c{number},0,started,,,{config}")
        rows.append(f"r1,0.2,c{number},0,{status},{perf},1.0,{config}")
    return "\n".join(rows)


GOOD = {
    "t4": ("kernel-tuner", t4(), 6),
    "cache": ("kernel-tuner", cache(), 3),
    "autotvm": ("autotvm", autotvm(), 2),
    "metaschedule": ("metaschedule", metaschedule(), 2),
    "autoheuristic": ("inductor", autoheuristic(), 16),
    "feedback": ("inductor", feedback(), 2),
    "triton": ("triton", triton(), 2),
    "helion": ("helion", helion(), 2),
}


def imported(tmp_path, name, text=None, **options):
    kind, good, _ = GOOD[name]
    log = tmp_path / f"{name}.log"
    log.write_text(good if text is None else text, encoding="utf-8")
    return import_logs(kind, [log], tmp_path / "out", **options)


def arrays(tmp_path):
    files = sorted((tmp_path / "out").glob("*/*.npz"))
    return [dict(np.load(file)) for file in files]


@pytest.mark.parametrize("name", GOOD)
def test_every_format_gives_kernels_that_load_as_a_collection(name, tmp_path):
    report = imported(tmp_path, name, split="train")
    assert report.configurations == GOOD[name][2]
    dataset = load_dataset(str(tmp_path / "out"))
    kernels = list(dataset.split("train"))
    assert len(kernels) == report.kernels > 0
    assert all(kernel.labelled for kernel in kernels)


def test_a_runtime_is_the_median_of_the_repeats_in_nanoseconds(tmp_path):
    imported(tmp_path, "t4")
    (kernel,) = arrays(tmp_path)
    assert sorted(kernel["config_runtime"]) == [1_000_000 * i for i in range(1, 7)]
    assert set(kernel["config_repeats"]) == {3}


def test_failures_are_kept_beside_what_ran(tmp_path):
    report = imported(tmp_path, "t4")
    (kernel,) = arrays(tmp_path)
    assert report.failures == len(kernel["failed_config_feat"]) == 1
    assert len(kernel["config_feat"]) == 6


def test_words_become_numbers_that_the_schema_explains(tmp_path):
    imported(tmp_path, "t4")
    schema = json.loads((tmp_path / "out" / "schema.json").read_text())
    (kernel,) = arrays(tmp_path)
    column = schema["config_features"].index("variant")
    words = ["", *schema["words"]["variant"]]
    assert {words[int(value)] for value in kernel["config_feat"][:, column]} == {"a", "b"}


def test_a_cache_that_is_still_being_written_is_read_as_far_as_it_goes(tmp_path):
    report = imported(tmp_path, "cache", cache()[:-2] + ",")
    assert (report.configurations, report.failures, report.devices) == (3, 1, ["RTX"])


def test_repeated_lines_of_one_configuration_are_repeats(tmp_path):
    imported(tmp_path, "autotvm")
    (kernel,) = arrays(tmp_path)
    assert sorted(kernel["config_runtime"]) == [1_000_000, 2_100_000]


def test_splits_of_a_tvm_schedule_are_multiplied_position_by_position(tmp_path):
    entity = [["tile_f", "sp", [2, 1, 16, 4]], ["tile_x", "sp", [8, 1, 8, 2]], ["tile_rc", "sp", [32, 4]]]
    entity += [["order", "re", [0, 2, 1, 3]], ["unroll", "ot", 512]]
    record = {"input": ["cuda", "conv", [["TENSOR", [8, 8], "float32"]], {}], "config": {"entity": entity}}
    imported(tmp_path, "autotvm", json.dumps(record | {"result": [[1e-3], 0, 1.0, 2.0]}))
    (kernel,) = arrays(tmp_path)
    columns = json.loads((tmp_path / "out" / "schema.json").read_text())["config_features"]
    row = dict(zip(columns, kernel["config_feat"][0].tolist(), strict=True))
    assert [row[f"splits_in_4_{i}"] for i in range(4)] == [16, 1, 128, 8]
    assert [row[f"splits_in_2_{i}"] for i in range(2)] == [32, 4]


def test_the_library_is_the_default_of_an_inductor_product_and_blocks_are_bounds(tmp_path):
    imported(tmp_path, "autoheuristic", split="train")
    schema = json.loads((tmp_path / "out" / "schema.json").read_text())["config_features"]
    for kernel in arrays(tmp_path):
        assert set(kernel["config_runtime_normalizers"]) == {300_000}
        assert set(kernel["config_feat"][:, schema.index("output_bounds_0")]) == {0, 16, 32, 64}
        assert kernel["node_feat"].shape == (3, 140)
    assert not [name for name in schema if name.startswith("BLOCK")]


def test_the_number_type_and_layout_that_a_product_was_logged_with_are_in_its_graph(tmp_path):
    names = "m,k,n,mat1_dtype,mat1_stride_0,mat1_stride_1,mat2_stride_0,mat2_stride_1,choice,feedback"
    rows = ['{"name": "mm"}', names]
    for strides in ("32,1,16,1", "1,8,16,1", "32,1,1,32"):
        for block in (16, 32):
            rows.append(f"8,32,16,torch.bfloat16,{strides},type=triton_BLOCK-M={block}_BLOCK-N=16_BLOCK-K=16,0.5")
    imported(tmp_path, "autoheuristic", "\n".join(rows), split="train")
    first_minor, bf16 = NODE_COLUMN["layout_minor_to_major_0"], NODE_COLUMN["shape_element_type_is_bf16"]
    graphs = [kernel["node_feat"] for kernel in arrays(tmp_path)]
    assert all((graph[:, bf16] == 1).all() for graph in graphs)
    assert sorted(graph[:2, first_minor].tolist() for graph in graphs) == [[0, 1], [1, 0], [1, 1]]


def test_one_shape_is_in_one_split_whatever_the_device(tmp_path):
    logs = []
    for device in ("A", "B"):
        lines = [
            json.dumps(
                {"name": "mm", "sizes": {"m": m}, "device": device, "choices": [[{"b": 1}, 1.0], [{"b": 2}, 2.0]]}
            )
            for m in range(40)
        ]
        logs.append(tmp_path / f"{device}.jsonl")
        logs[-1].write_text("\n".join(lines))
    report = import_logs("inductor", logs, tmp_path / "out")
    assert report.splits == {"train": 64, "valid": 8, "test": 8}
    home = {}
    for file in (tmp_path / "out").glob("*/*.npz"):
        sizes = json.loads(np.load(file)["problem"].tobytes())["sizes"]
        assert home.setdefault(json.dumps(sizes), file.parent.name) == file.parent.name


def test_gzip_and_zip_are_read_as_they_are(tmp_path):
    packed = tmp_path / "log.json.gz"
    packed.write_bytes(gzip.compress(t4().encode()))
    archive = tmp_path / "log.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("../../x.json", t4())
    for number, file in enumerate((packed, archive)):
        assert import_logs("kernel-tuner", [file], tmp_path / f"out{number}").configurations == 6
    assert not (tmp_path.parent / "x.json").exists()


def test_a_description_gives_a_graph_and_bounds(tmp_path):
    described = tmp_path / "conv.json"
    content = {
        "operation": "convolution",
        "loops": {"h": 512, "w": "block_size_x", "fh": 3},
        "operands": [["h", "w"], ["fh"]],
        "result": ["h", "w"],
        "tile": {"w": ["block_size_x", "use_padding"]},
    }
    described.write_text(json.dumps(content))
    imported(tmp_path, "t4", description=read_description(described))
    (kernel,) = arrays(tmp_path)
    assert len(kernel["node_opcode"]) == 3
    assert kernel["config_feat"].shape[1] == 24 + 3  # parameters that share a loop keep columns of their own


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"loops": 1, "operands": [], "result": []}',
        '{"loops": {}, "operands": [["x"]], "result": []}',
        '{"loops": {"x": []}, "operands": [["x"]], "result": []}',
        '{"loops": {"x": 1}, "operands": [["x"]], "result": ["x"], "dtype": 3}',
    ],
)
def test_a_bad_description_is_one_sentence(content, tmp_path):
    path = tmp_path / "d.json"
    path.write_text(content)
    with pytest.raises(FileFormatError, match=str(path)):
        read_description(path)


def test_nothing_appears_where_nothing_could_be_read(tmp_path):
    with pytest.raises(FileFormatError, match="No kernel"):
        imported(tmp_path, "autotvm", "{}\n[]\n3\n")
    assert [path.name for path in tmp_path.iterdir()] == ["autotvm.log"]


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigurationError, match="new folder"):
        imported(tmp_path, "t4")


def test_unknown_formats_are_named_with_those_there_are(tmp_path):
    with pytest.raises(ConfigurationError, match="helion"):
        import_logs("nothing", [tmp_path / "x"], tmp_path / "out")


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_log_that_is_cut_short_while_compressed_is_one_sentence(tmp_path, format_name):
    content = gzip.compress(b'{"a": "' + bytes(range(32, 127)) * 400 + b'"}\n' * 50)
    (tmp_path / "log.csv.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(FileFormatError, match=r"log\.csv\.gz is damaged or cut short"):
        import_logs(format_name, [tmp_path / "log.csv.gz"], tmp_path / "out")


def test_the_gpu_in_a_file_name_is_the_device_of_its_records(tmp_path):
    assert gpu_name_in("NVIDIA A100-PCIE-40GB") == "A100" == gpu_name_in("convolution_a100.T4.json.gz")
    assert gpu_name_in("RTX A4000") == "A4000" and gpu_name_in("GA1000") == "" == gpu_name_in("")
    for name in ("A100", "W7800"):
        (tmp_path / f"conv_{name}.T4.json").write_text(t4())
    report = import_logs("kernel-tuner", sorted(tmp_path.glob("*.json")), tmp_path / "out", split="train")
    assert report.devices == ["A100", "W7800"]
    data = load_dataset(tmp_path / "out", cache_dir=tmp_path / "cache", progress=False)
    assert sorted(kernel.program for kernel in data.train) == ["conv-A100", "conv-W7800"]


def test_json_is_walked_the_same_in_pieces_of_any_size(monkeypatch):
    text = json.dumps({"é": [1.25, "ü" * 50, {"a": [None, True]}], "n": 12345, "results": list(range(300))})
    for piece in (1, 2, 3, 7, 64):
        monkeypatch.setattr("tilewise.costmodel.data.importers.stream._CHUNK_BYTES", piece)
        walker = JsonWalker(Source("x", io.BytesIO(text.encode())))
        columns = {
            key: list(walker.elements()) if walker.next_char() == "[" else walker.value() for key in walker.members()
        }
        assert columns == json.loads(text)


def mutate(text, rng):
    content = bytearray(text.encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content))
        action = rng.randrange(5)
        if action == 0:
            content[at] = rng.randrange(256)
        elif action == 1:
            del content[at : at + rng.randint(1, 20)]
        elif action == 2:
            content[at:at] = rng.choice(
                [b"[" * 5000, b"null", b"1e999", b"-1", b'"', b"\x00", b"9" * 400, b"\xff\xfe", b"{"]
            )
        elif action == 3:
            content[at:at] = content[at // 2 : at]
        else:
            content = content[: at + 1]
    return bytes(content)


def test_records_of_inductor_are_ranked_by_the_shipped_model_without_the_library(tmp_path):
    head = json.dumps({"name": "mm", "device_capa": [8, 0]})
    choice = "type=triton_BLOCK-M={}_BLOCK-K=32_BLOCK-N=64_numstages=4_numwarps=4"
    rows = ["512,256,512,extern_mm,0.01"] + [f"512,256,512,{choice.format(m)},0.0{m}" for m in (16, 32, 64, 128)]
    (tmp_path / "log.txt").write_text("\n".join([head, "m,k,n,choice,feedback", *rows]))
    import_logs("inductor", [tmp_path / "log.txt"], tmp_path / "out", split="test")
    data = load_dataset(tmp_path / "out", cache_dir=tmp_path / "cache", progress=False)
    model = shipped_scorer("h200")
    selected, rows_of = select_columns(data, model.schema)
    (kernel,) = selected.test
    assert kernel.n_configs == 4 == len(rows_of[kernel.name])
    assert set(kernel.config_feat[:, model.schema.config_features.index("group")]) == {8}
    assert np.isfinite(model.score(kernel)).all()
    lacking = Schema((*model.schema.config_features, "split"))
    with pytest.raises(ConfigurationError, match="--fill split=VALUE"):
        select_columns(data, lacking)
    assert select_columns(data, lacking, {"split": 1})[0].test[0].config_feat[0, -1] == 1


TUNED_NAME = "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
TUNED_ROW = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4,
             "num_stages": 3}  # fmt: skip


def tuned(*tokens):
    return json.dumps({"triton_version": "3.5.1"} | {str(m): TUNED_ROW for m in tokens})


def tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def test_a_tuned_row_is_the_winner_among_the_configurations_of_the_search_list(tmp_path):
    files = {f"fused_moe/{TUNED_NAME}": tuned(1, 64), "LICENSE": "Apache", "fused_moe/notes.json": '{"1": {}}'}
    report = import_logs("vllm", [tar(tmp_path / "tuned.tar.gz", files)], tmp_path / "out", split="train")
    assert report.kernels == 2 and report.devices == ["NVIDIA_H200"]
    assert sum(report.skipped.values()) == 2  # neither the licence nor a file without a shape is a kernel
    data = load_dataset(tmp_path / "out", cache_dir=tmp_path / "cache", progress=False)
    for kernel in data.train:
        assert sorted(set(kernel.runtime)) == [1, 2] and list(kernel.runtime).count(1) == 1
        columns = dict(zip(data.schema.config_features, kernel.config_feat[kernel.runtime.argmin()], strict=True))
        assert columns["BLOCK_SIZE_N"] == 64 and columns["stages"] == 3 and columns["warps"] == 4
    assert "not a time" in json.loads((tmp_path / "out/schema.json").read_text())["runtime"]


def test_alternatives_are_all_other_tiles_and_each_other_setting_of_the_search_list():
    family, sizes, device = "fused_moe", {"m": 1}, "NVIDIA_H200"
    # NVIDIA: 5 x 4 x 3 tiles, and 3 + 1 + 3 other settings. AMD: 5 x 5 x 4 tiles, and 4 + 3 + 1 other settings.
    for name, config, tiles, others in (
        (device, TUNED_ROW, 60, 7),
        ("AMD_Instinct_MI300X", TUNED_ROW, 100, 8),
        ("AMD_Radeon", TUNED_ROW | {"waves_per_eu": 0, "matrix_instr_nonkdim": 16, "kpack": 2}, 100, 8 + 3 + 1 + 1),
    ):
        rows = [dict(row) for row in alternatives(TunedRow(family, sizes, name, config))]
        assert len({tuple(sorted(row.items())) for row in rows}) == len(rows) == tiles - 1 + others
        assert config not in rows
        for row in rows:
            exact = [value for key, value in row.items() if key not in ("num_stages", "waves_per_eu")]
            assert all(value & (value - 1) == 0 and value for value in exact)  # as Triton needs
    update = {"BLOCK_SIZE_M": 8, "num_warps": 4}
    rows = list(alternatives(TunedRow("selective_state_update", sizes, device, update)))
    assert len(rows) == 4 + 3 and all(value & (value - 1) == 0 for row in rows for value in row.values())


@pytest.mark.parametrize("settings, skipped", [(20, 0), (21, 1)])
def test_a_tuned_row_has_at_most_twenty_settings(settings, skipped):
    row = TUNED_ROW | {f"s{number}": (1 << 24) - 1 for number in range(settings - len(TUNED_ROW))}
    good, wrong = {"1": row, "16777215": TUNED_ROW}, {"0": row, "16777216": row, "x": row, "2": row | {"s": 1 << 24}}
    reasons, text = [], json.dumps(good | wrong | {"3": row | {"s": -1}, "4": row | {"s": True}})
    rows = list(read_rows(Source(TUNED_NAME, io.BytesIO(text.encode())), reasons.append))
    assert len(rows) == 2 - skipped and len(reasons) == 6 + skipped
    assert rows[-1].sizes["m"] == (1 << 24) - 1


def test_as_many_parameters_as_the_limit_says_are_read(tmp_path, monkeypatch):
    (tmp_path / "log").write_text(json.dumps({"name": "mm", "sizes": {}, "choices": [[{"a": 1, "b": 2}, 1.0]]}))
    monkeypatch.setattr("tilewise.costmodel.data.importers.build.MAX_COLUMNS", 2)
    assert import_logs("inductor", [tmp_path / "log"], tmp_path / "out").kernels == 1
    monkeypatch.setattr("tilewise.costmodel.data.importers.build.MAX_COLUMNS", 1)
    with pytest.raises(FileFormatError, match="2 different parameters; at most 1"):
        import_logs("inductor", [tmp_path / "log"], tmp_path / "refused")


def test_a_kernel_of_which_nothing_ran_is_counted_once(tmp_path):
    rows = [{"name": "mm", "sizes": {"m": m}, "choices": [[{"b": 1}, time]]} for m, time in ((1, None), (2, 0.5))]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, rows)))
    report = import_logs("inductor", [tmp_path / "log"], tmp_path / "out")
    assert (report.kernels, report.failures) == (1, 1)
    assert report.skipped == {"a kernel with no configuration that ran": 1}


def test_damaged_tuned_files_are_read_in_part_or_refused_in_a_sentence():
    rng, rows = random.Random(1), 0
    for _ in range(400):
        name = mutate(TUNED_NAME, rng).decode("utf-8", "replace") if rng.random() < 0.3 else TUNED_NAME
        reasons = []
        try:
            rows += len(list(read_rows(Source(name, io.BytesIO(mutate(tuned(1, 2, 64), rng))), reasons.append)))
        except TilewiseError as error:
            reasons.append(str(error))
        assert all("\n" not in reason and len(reason) < 200 for reason in reasons) or len(name) > 100
    assert rows > 100


def test_a_tar_archive_is_bounded(tmp_path, monkeypatch):
    path = tar(tmp_path / "tuned.tar.gz", {f"{n}/{TUNED_NAME}": tuned(1) for n in range(30)})
    monkeypatch.setattr("tilewise.costmodel.data.importers.stream.MAX_MEMBERS", 20)
    with pytest.raises(FileFormatError, match="more than 20 files"):
        import_logs("vllm", [path], tmp_path / "out")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(FileFormatError, match="damaged or cut short"):
        import_logs("vllm", [path], tmp_path / "out")


def test_a_zip_archive_is_bounded_and_may_have_as_many_files_as_the_limit_says(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        for number in range(3):
            archive.writestr(f"{number}.json", t4())
    monkeypatch.setattr("tilewise.costmodel.data.importers.stream.MAX_MEMBERS", 3)
    assert import_logs("kernel-tuner", [tmp_path / "logs.zip"], tmp_path / "out").configurations >= 6
    monkeypatch.setattr("tilewise.costmodel.data.importers.stream.MAX_MEMBERS", 2)
    with pytest.raises(FileFormatError, match="contains 3 files; at most 2 are read"):
        import_logs("kernel-tuner", [tmp_path / "logs.zip"], tmp_path / "refused")


def test_the_device_of_a_tvm_log_is_its_target(tmp_path):
    assert imported(tmp_path, "autotvm").devices == ["cuda -model=v100"]
    assert import_logs("metaschedule", [_file(tmp_path, metaschedule())], tmp_path / "meta").devices == ["llvm skylake"]


def _file(folder, text):
    path = folder / "log.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", GOOD)
def test_damaged_logs_are_read_in_part_or_refused_in_a_sentence(name, tmp_path):
    rng = random.Random(name)
    kind, good, _ = GOOD[name]
    for number in range(120):
        log = tmp_path / f"{number}.json"
        log.write_bytes(mutate(good, rng))
        try:
            import_logs(kind, [log], tmp_path / f"out{number}")
        except TilewiseError as error:
            assert "\n" not in str(error)


def test_timings_in_any_order_and_in_batches_of_any_size_give_the_same(tmp_path, monkeypatch):
    rng = random.Random(3)
    choices = [
        [{"block": rng.randrange(5), "word": rng.choice("xy")}, rng.choice([1.5, 2.5, 0.25, None])] for _ in range(900)
    ]
    rows = [{"name": "mm", "sizes": {"m": rng.randrange(4)}, "choices": [choice]} for choice in choices]
    reports = []
    for out, at_once in (("whole", 1 << 20), ("cut", 64)):
        monkeypatch.setattr("tilewise.costmodel.data.importers.record_table._BATCH_TIMINGS", at_once)
        (tmp_path / "log").write_text("\n".join(map(json.dumps, sorted(rows, key=str) if out == "cut" else rows)))
        reports.append(import_logs("inductor", [tmp_path / "log"], tmp_path / out, split="train"))
    assert reports[0] == reports[1]
    assert reports[0].timings == sum(choice[1] is not None for choice in choices)
    for file in (tmp_path / "whole").glob("*/*.npz"):
        cut, whole = np.load(tmp_path / "cut" / file.parent.name / file.name), np.load(file)
        orders = [np.lexsort(kernel["config_feat"].T) for kernel in (whole, cut)]
        for key in ("config_feat", "config_runtime", "config_repeats"):
            np.testing.assert_array_equal(whole[key][orders[0]], cut[key][orders[1]])


def test_repeats_of_a_configuration_that_also_failed_are_those_that_ran(tmp_path):
    choices = [[{"b": 1}, 3.0], [{"b": 2}, None], [{"b": 1}, None], [{"b": 1}, 1.0]]
    (tmp_path / "log").write_text(json.dumps({"name": "mm", "sizes": {}, "choices": choices}))
    report = import_logs("inductor", [tmp_path / "log"], tmp_path / "out")
    (kernel,) = arrays(tmp_path)
    assert (report.configurations, report.failures) == (1, 1)
    assert kernel["config_runtime"].tolist() == [2_000_000]
    assert kernel["config_repeats"].tolist() == [2]
    np.testing.assert_allclose(kernel["config_deviation"], [2**0.5 / 2])


def test_the_literals_of_a_helion_configuration_are_read_as_python_reads_them(tmp_path):
    rows = ["run_id,config_id,status,perf_ms,config"]
    for text in ("Config(a=[1, 2], b='x', c=None)", "Config(a=(3, 4), b='it\\'s', on=True)", "{'a': 5, 'b': [1e-3]}"):
        rows.append(f'r,c,ok,0.5,"{text}"')
    rows += ["r,c,ok,0.5,Config(a=f())", "r,c,ok,0.5,7", f"r,c,ok,0.5,{'[' * 30_000}"]
    report = imported(tmp_path, "helion", "\n".join(rows))
    assert (report.configurations, sum(report.skipped.values())) == (3, 3)
    schema = json.loads((tmp_path / "out" / "schema.json").read_text())
    assert schema["config_features"] == ["a", "a_0", "a_1", "b", "b_0", "on"]
    assert schema["words"] == {"b": ["it's", "x"]}


def test_configurations_are_told_apart_by_words_and_numbers_whatever_their_order():
    rows = LoggedConfigs()
    row_list = [
        {"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}, {"a": 2.0, "b": 1.0}, {"a": 1.0}, {"b": 1.0}, {},
        {"a": "x", "b": 2.0}, {"b": 2.0, "a": "y"}, {"a": "x", "b": "x"}, {"a": 1.0, "b": "x"}, {"a": "x", "b": 2.0},
    ]  # fmt: skip
    numbers = [rows.number(config) for config in row_list]
    assert numbers == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 5]
    for config, number in zip(row_list, numbers, strict=True):
        expected = {name: value for name, value in config.items() if not isinstance(value, str)}
        assert rows.numeric_parameters(number) == expected
    columns = rows.columns(("b", "a"), {"a": {"x": 10.0, "y": 20.0}, "b": {"x": 30.0}})
    assert columns.tolist() == [[2, 1], [1, 2], [0, 1], [1, 0], [0, 0], [2, 10], [2, 20], [30, 10], [30, 1]]


def test_a_parameter_of_too_many_words_is_left_out_and_its_configurations_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise.costmodel.data.importers.record_table.MAX_WORDS", 5)
    monkeypatch.setattr("tilewise.costmodel.data.importers.build.MAX_WORDS", 5)
    choices = [[{"b": i % 3, "name": f"w{i}"}, 1.0 + i] for i in range(12)] * 2
    (tmp_path / "log").write_text(json.dumps({"name": "mm", "sizes": {}, "choices": choices}))
    report = import_logs("inductor", [tmp_path / "log"], tmp_path / "out")
    assert (report.configurations, report.timings) == (12, 24)
    assert any("name has more than 5" in sentence for sentence in report.missing)


def test_too_many_sets_of_parameters_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise.costmodel.data.importers.record_table.MAX_LAYOUT_NAMES", 10)
    choices = [[{f"p{i}": 1, f"q{i}": 2}, 1.0] for i in range(12)]
    (tmp_path / "log").write_text(json.dumps({"name": "mm", "sizes": {}, "choices": choices}))
    with pytest.raises(FileFormatError, match="sets of parameters"):
        import_logs("inductor", [tmp_path / "log"], tmp_path / "out")


def test_what_is_remembered_is_told_apart_by_type_and_place(tmp_path):
    choices = [[{"b": 1}, 1.0], [{"b": "1"}, 3.0], [{"b": True}, 2.0], [{"b": "x"}, 4.0], [{"b": [1]}, 5.0]]
    (tmp_path / "log").write_text(json.dumps({"name": "mm", "sizes": {}, "choices": choices}))
    import_logs("inductor", [tmp_path / "log"], tmp_path / "out")
    (kernel,) = arrays(tmp_path)
    assert kernel["config_repeats"].tolist() == [3, 1, 1]  # 1, "1" and True are one number


def test_a_long_log_takes_little_memory(tmp_path):
    log = tmp_path / "long.log"
    line = autotvm().splitlines()[0]
    with log.open("w") as stream:
        for tile in range(40_000):
            stream.write(
                line.replace("[-1, 2]", f"[-1, {tile % 100}]").replace("64, 56, 56", f"64, 56, {tile % 7}") + "\n"
            )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = import_logs("autotvm", [log], tmp_path / "out")
    assert report.timings == 40_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared sample data are not here")
def test_kernel_tuner_files_of_six_gpus_are_read_whole(tmp_path):
    files = sorted((SHARED / "t4").glob("convolution_A100*.gz"))
    report = import_logs("kernel-tuner", files, tmp_path / "out", device="A100")
    assert (report.configurations, report.failures) == (4201, 161)


def test_the_formats_of_the_command_line_are_these():
    assert set(FORMATS) == {"kernel-tuner", "autotvm", "metaschedule", "inductor", "triton", "helion", "vllm"}
    assert isinstance(FORMATS["inductor"].description, KernelDescription)


def many_kernels(tmp_path):
    rng = random.Random(7)
    log = tmp_path / "log"
    log.write_text(
        "\n".join(
            json.dumps(
                {
                    "name": "mm",
                    "sizes": {"m": number, "n": 3, "k": 8},
                    "choices": [[{"b": b}, rng.choice([0.5, 2.0, None])] for b in range(5)] + [[{"b": 9}, 1.0]],
                }
            )
            for number in range(40)
        )
    )
    return log


def test_very_many_kernels_are_flat_files_that_hold_the_same(tmp_path, monkeypatch):
    log = many_kernels(tmp_path)
    files = import_logs("inductor", [log], tmp_path / "files")
    monkeypatch.setattr("tilewise.costmodel.data.importers.build.MAX_FILES", 39)
    assert import_logs("inductor", [log], tmp_path / "flat") == files
    assert not list((tmp_path / "flat").glob("*/*.npz"))
    both = [read_folder(tmp_path / form) for form in ("files", "flat")]
    for split, members in both[0].splits.items():
        flat = {m.kernel.name: m for m in both[1].splits[split]}
        assert flat.keys() == {m.kernel.name for m in members}
        for one in members:
            other = flat[one.kernel.name]
            for name in ("node_feat", "node_opcode", "edge_index", "config_feat", "runtime", "normalizer"):
                np.testing.assert_array_equal(getattr(one.kernel, name), getattr(other.kernel, name))
            np.testing.assert_array_equal(one.deviation, other.deviation)
            np.testing.assert_array_equal(one.repeats, other.repeats)
    data = load_dataset(tmp_path / "flat", limit=2)
    assert (len(data.train), len(data.test)) == (2, 2)


def test_damaged_flat_files_are_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise.costmodel.data.importers.build.MAX_FILES", 1)
    import_logs("inductor", [many_kernels(tmp_path)], tmp_path / "flat", split="train")
    folder, rng, rejections = tmp_path / "flat" / "train", random.Random(5), 0
    for name in ("index.json", "edge_index.bin", "node_opcode.bin", "runtime.bin", "config_feat.bin"):
        good = (folder / name).read_bytes()
        for _ in range(20):
            bad = mutate(good.decode(), rng) if name == "index.json" else b"\xff" * len(good)
            (folder / name).write_bytes(bad)
            try:
                for kernel in load_dataset(tmp_path / "flat").train:
                    assert kernel.edge_index.max() < kernel.n_nodes
            except TilewiseError as error:
                rejections += 1
                assert "\n" not in str(error)
        (folder / name).write_bytes(good)
    assert rejections > 80


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_import_that_is_ended_leaves_nothing(number, tmp_path):
    (tmp_path / "log").write_text(f"{feedback()}\n" * 200_000)  # long enough to be in the middle of it
    command = [sys.executable, "-m", "tilewise", "tiles", "import", "inductor", "log", "--out", "out/new"]
    with interruptible():
        process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path)
    until(lambda: list((tmp_path / "out").glob(".new.*")) or process.poll() is not None, "the import's folder")
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert not list((tmp_path / "out").glob("*"))
