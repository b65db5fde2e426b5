"""Reading collections: what is accepted, what is refused with a sentence, and what the cache promises."""

from __future__ import annotations

import io
import json
import multiprocessing
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from costmodel.simulated import simulated_kernel, simulated_kernels, write_collection, write_npz
from tilewise.costmodel import load_dataset
from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection
from tilewise.costmodel.data.kernel import program_of
from tilewise.costmodel.data.npz import read_npz
from tilewise.costmodel.data.schema import NODE_FEATURES, OPCODES, TILE_FEATURES, Schema
from tilewise.costmodel.data.shards import open_packed, read_kernel
from tilewise.costmodel.data.writing import SplitWriter, npz_bytes
from tilewise.costmodel.data.writing import write_collection as write_collection_file
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError


@pytest.fixture
def kernel():
    return simulated_kernel(np.random.default_rng(1), "prog_0123")


def test_tables_have_the_sizes_of_the_format():
    assert (len(NODE_FEATURES), len(TILE_FEATURES), len(OPCODES)) == (140, 24, 121)
    assert OPCODES[63] == "parameter" and OPCODES[97] == "trace" and OPCODES[0] == "unknown"
    assert NODE_FEATURES[21] == "shape_dimensions_0" and NODE_FEATURES[134] == "layout_minor_to_major_0"


def test_a_collection_reads_back_what_was_written(tmp_path):
    write_collection(tmp_path / "c", 5, 3, 2)
    data = load_dataset(tmp_path / "c", cache_dir=tmp_path / "cache", progress=False)
    assert [len(data.train), len(data.valid), len(data.test)] == [5, 3, 2]
    for split in ("train", "valid", "test"):
        for kernel_read in data.split(split):
            fresh = read_kernel(tmp_path / "c" / split / f"{kernel_read.name}.npz", 24)
            for field in ("node_feat", "node_opcode", "edge_index", "config_feat", "runtime", "normalizer"):
                np.testing.assert_array_equal(getattr(kernel_read, field), getattr(fresh, field))
    assert data.schema.extra == {"hardware": "simulated"}
    first = data.train[0]
    np.testing.assert_allclose(first.target, first.runtime / first.normalizer)


def test_kernels_are_views_of_memory_mapped_files(tmp_path):
    write_collection(tmp_path / "c", 3, 1, 1)
    data = load_dataset(tmp_path / "c", cache_dir=tmp_path / "cache", progress=False)
    assert isinstance(data.train[1].config_feat, np.memmap) and not data.train[1].config_feat.flags.owndata


def test_second_load_reads_no_npz_and_a_changed_file_is_noticed(tmp_path, monkeypatch):
    root, cache = write_collection(tmp_path / "c", 3, 1, 1), tmp_path / "cache"
    load_dataset(root, cache_dir=cache, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.costmodel.data.shards.read_kernel", lambda *a: pytest.fail("converted twice"))
        load_dataset(root, cache_dir=cache, progress=False)
    victim = next((root / "train").glob("*.npz"))
    changed = simulated_kernel(np.random.default_rng(9), victim.stem, n_configs=7)
    write_npz(changed, root / "train")
    assert 7 in [k.n_configs for k in load_dataset(root, cache_dir=cache, progress=False).train]


def test_program_is_what_stands_before_the_last_underscore():
    assert program_of("inception_v3_batch_128_train_426e203f19335d17") == "inception_v3_batch_128_train"
    assert program_of("d6f5f54247bd1e58a10b9e7062c636ab") == "d6f5f54247bd1e58a10b9e7062c636ab"


def test_limit_takes_the_first_files(tmp_path):
    root = write_collection(tmp_path / "c", 5, 3, 2)
    data = load_dataset(root, cache_dir=tmp_path, limit=2, progress=False)
    assert data.train.names == sorted(p.stem for p in (root / "train").iterdir())[:2]


def test_any_width_named_by_the_schema_is_read(tmp_path, kernel):
    wide = np.hstack([kernel.config_feat, kernel.config_feat[:, :5]])
    write_npz(kernel, tmp_path / "train", config_feat=wide)
    with pytest.raises(FileFormatError, match="config_feat has 29 columns"):
        load_dataset(tmp_path, cache_dir=tmp_path / "cache", progress=False)
    (tmp_path / "schema.json").write_text(json.dumps({"config_features": [f"c{i}" for i in range(29)]}))
    data = load_dataset(tmp_path, cache_dir=tmp_path / "cache", progress=False)
    assert data.train[0].config_feat.shape[1] == 29 and data.schema.config_features[3] == "c3"


@pytest.mark.parametrize("content", ["[1]", "{", '{"config_features": [1]}', '{"config_features": ["a", "a"]}', "\xff"])
def test_a_bad_schema_is_one_sentence(tmp_path, content):
    (tmp_path / "schema.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(FileFormatError):
        load_dataset(tmp_path, cache_dir=tmp_path, progress=False)


BAD = {
    "edge out of range": {"edge_index": np.array([[0, 99]], np.int64)},
    "negative edge": {"edge_index": np.array([[0, -1]], np.int64)},
    "edge shape": {"edge_index": np.zeros((2, 3), np.int64)},
    "float edges": {"edge_index": np.zeros((2, 2))},
    "opcode": {"node_opcode": np.array([63, 63, 200], np.uint8)},
    "too many opcodes": {"node_opcode": np.zeros(40, np.uint8)},
    "nan": {"node_feat": np.full((3, 140), np.nan, np.float32)},
    "infinite": {"config_feat": np.full((60, 24), np.inf, np.float32)},
    "beyond float32": {"config_feat": np.full((60, 24), 1e300)},
    "object": {"node_feat": np.array([{}], object)},
    "text": {"config_runtime": np.array(["a"] * 60)},
    "some zero": {"config_runtime": np.arange(60)},
    "negative": {"config_runtime": np.full(60, -5)},
    "negative runtimes": {"config_runtime": np.full(60, -5.0)},
    "no normalizer": {"config_runtime_normalizers": np.zeros(60, np.int64)},
    "lengths": {"config_runtime": np.ones(61, np.int64)},
    "scalar": {"config_runtime": np.int64(3)},
    "no configs": {
        "config_feat": np.zeros((0, 24), np.float32),
        "config_runtime": np.zeros(0, np.int64),
        "config_runtime_normalizers": np.zeros(0, np.int64),
    },
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_array_is_refused_with_the_file_named(tmp_path, kernel, case):
    path = write_npz(kernel, tmp_path, **BAD[case])
    with pytest.raises(FileFormatError, match=path.name):
        read_kernel(path, 24)


def test_one_node_and_one_configuration_are_a_kernel(tmp_path, kernel):
    sizes = {
        "node_feat": kernel.node_feat[:1],
        "node_opcode": kernel.node_opcode[:1],
        "edge_index": kernel.edge_index[:0],
    }
    sizes |= {"config_feat": kernel.config_feat[:1], "config_runtime": kernel.runtime[:1]}
    path = write_npz(kernel, tmp_path, **sizes, config_runtime_normalizers=kernel.normalizer[:1])
    assert (read_kernel(path, 24).n_nodes, read_kernel(path, 24).n_configs) == (1, 1)


@pytest.mark.parametrize("limit", ["MAX_NODES", "MAX_EDGES", "MAX_CONFIGS"])
def test_the_largest_kernel_is_read_and_a_larger_one_is_refused(tmp_path, kernel, monkeypatch, limit):
    size = {"MAX_NODES": kernel.n_nodes, "MAX_EDGES": len(kernel.edge_index), "MAX_CONFIGS": kernel.n_configs}[limit]
    path = write_npz(kernel, tmp_path)
    monkeypatch.setattr(f"tilewise.costmodel.data.kernel.{limit}", size)
    assert read_kernel(path, 24).n_configs == kernel.n_configs
    monkeypatch.setattr(f"tilewise.costmodel.data.kernel.{limit}", size - 1)
    with pytest.raises(FileFormatError, match="it needs 1 to"):
        read_kernel(path, 24)


def test_a_missing_key_is_named_and_an_extra_one_ignored(tmp_path, kernel):
    path = write_npz(kernel, tmp_path, selected_index=np.array([object()]))
    assert read_kernel(path, 24).n_configs == 60
    with np.load(path, allow_pickle=False) as z:
        arrays = {k: z[k] for k in z.files if k not in ("node_opcode", "selected_index")}
    np.savez(path, **arrays)
    with pytest.raises(FileFormatError, match="lacks node_opcode"):
        read_kernel(path, 24)


def _npy(descr: str, shape: str, body: bytes) -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


@pytest.mark.parametrize(
    "payload",
    [
        _npy("<f4", "(1000000000000,)", b"\0" * 64),
        _npy("|O", "(1,)", b"\x80\x04N."),
        _npy("<f4", "(99999999999999999999999,)", b""),
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"{",
        b"not numpy at all",
        b"",
    ],
)
def test_hostile_members_are_refused_without_allocating(tmp_path, payload):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("node_feat.npy", payload)
    with pytest.raises(FileFormatError):
        read_npz(path, ["node_feat"])


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("node_feat.npy", "w") as member:
        for _ in range(64):
            member.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr("tilewise.costmodel.data.npz.MAX_UNPACKED_BYTES", 32 << 20)
    with pytest.raises(FileFormatError, match="more than"):
        read_npz(path, ["node_feat"])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<i8", "|u1"])
def test_orders_and_endianness_are_read_as_numpy_does(tmp_path, order, dtype):
    array = np.asarray(np.random.default_rng(0).integers(0, 200, (5, 7)).astype(dtype), order=order)
    np.savez(tmp_path / "a.npz", a=array)
    np.testing.assert_array_equal(read_npz(tmp_path / "a.npz", ["a"])["a"], array)


def test_what_is_written_is_read_by_numpy_zipfile_and_us(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "none": np.empty((0, 3), np.float32),
        "one": np.ones(1, np.uint16),
        "turned": rng.standard_normal((300, 7)).T,
        "long": rng.integers(0, 9, 200_000),
    }
    path = tmp_path / "a.npz"
    path.write_bytes(npz_bytes(arrays))
    assert npz_bytes(arrays) == path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    ours, numpys = read_npz(path, list(arrays)), np.load(path)
    for key, array in arrays.items():
        for gradient in (ours[key], numpys[key]):
            assert gradient.dtype == array.dtype
            np.testing.assert_array_equal(gradient, array)


def test_unlabelled_split_is_read_but_may_not_be_mixed(tmp_path, kernel):
    zero = np.zeros(60, np.int64)
    write_npz(kernel, tmp_path / "test", config_runtime=zero)
    data = load_dataset(tmp_path, cache_dir=tmp_path / "cache", progress=False)
    assert not data.test.labelled
    with pytest.raises(TilewiseError, match="no runtimes"):
        _ = data.test[0].target
    write_npz(simulated_kernels(1, 5)[0], tmp_path / "test")
    with pytest.raises(FileFormatError, match="others have none"):
        load_dataset(tmp_path, cache_dir=tmp_path / "cache", progress=False)


def test_a_folder_that_is_no_collection_is_one_sentence(tmp_path):
    with pytest.raises(ConfigurationError):
        load_dataset(tmp_path / "nowhere")
    with pytest.raises(FileFormatError):
        load_dataset(tmp_path)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, kernel):
    write_npz(kernel, tmp_path / "train", edge_index=np.array([[7, 7]], np.int64))
    with pytest.raises(FileFormatError):
        load_dataset(tmp_path, cache_dir=tmp_path / "cache", progress=False)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_an_abandoned_conversion_is_swept_and_redone(tmp_path):
    root, cache = write_collection(tmp_path / "c", 2, 1, 1), tmp_path / "cache"
    load_dataset(root, cache_dir=cache, progress=False)
    for folder in [p for p in cache.iterdir() if p.is_dir()]:
        folder.rename(folder.with_suffix(".unfinished"))
        (folder.with_suffix(".unfinished") / "index.json").unlink()
    assert len(load_dataset(root, cache_dir=cache, progress=False).train) == 2
    assert not list(cache.glob("*.unfinished"))


def _load(root: str, cache: str, queue: multiprocessing.Queue) -> None:
    data = load_dataset(root, cache_dir=cache, progress=False)
    queue.put(sum(int(k.runtime.sum()) for k in data.train))


def test_converters_at_the_same_time_agree(tmp_path):
    root = write_collection(tmp_path / "c", 12, 1, 1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_load, args=(str(root), str(tmp_path / "cache"), queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    sums = {queue.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(sums) == 1 and not list((tmp_path / "cache").glob("*.unfinished"))


def test_mutated_files_give_a_sentence_or_a_kernel(tmp_path, kernel):
    original = write_npz(kernel, tmp_path).read_bytes()
    _mutate_and_read(tmp_path / "m_1.npz", original, 300, seed=0)


@pytest.mark.slow
def test_ten_thousand_mutated_files_give_a_sentence_or_a_kernel(tmp_path, kernel):
    stored = io.BytesIO()
    with np.load(write_npz(kernel, tmp_path)) as z:
        np.savez(stored, **dict(z))
    _mutate_and_read(tmp_path / "m_1.npz", stored.getvalue(), 5000, seed=1)
    _mutate_and_read(tmp_path / "m_2.npz", (tmp_path / f"{kernel.name}.npz").read_bytes(), 5000, seed=2)


def _mutate_and_read(path: Path, original: bytes, times: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rejections = 0
    for _ in range(times):
        path.write_bytes(mutate(original, rng))
        try:
            kernel_read = read_kernel(path, 24)
            assert np.isfinite(kernel_read.config_feat).all() and (kernel_read.edge_index < kernel_read.n_nodes).all()
        except TilewiseError as error:
            assert "\n" not in str(error)
            rejections += 1
    assert rejections > times // 4


def mutate(original: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(original)
    kind = rng.integers(4)
    if kind == 0:
        return bytes(data[: rng.integers(len(data))])
    if kind == 1:
        for _ in range(rng.integers(1, 8)):
            data[rng.integers(len(data))] = rng.integers(256)
    elif kind == 2:
        at = rng.integers(len(data))
        data[at : at + rng.integers(1, 200)] = rng.bytes(int(rng.integers(0, 200)))
    else:
        a, b = sorted(rng.integers(0, len(data), 2))
        data[a:b] = data[a:b][::-1]
    return bytes(data)


def test_a_large_collection_may_unpack_to_more_than_a_kernel_and_a_bomb_may_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise.costmodel.data.npz.MAX_UNPACKED_BYTES", 1 << 16)
    noise = np.random.default_rng(0).integers(0, 255, 1 << 16).astype(np.uint8)
    np.savez_compressed(tmp_path / "large.npz", a=np.repeat(noise, 8))
    assert len(read_npz(tmp_path / "large.npz", ["a"])["a"]) == 8 << 16
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(1 << 20, np.uint8))
    with pytest.raises(FileFormatError, match="unpacks to"):
        read_npz(tmp_path / "bomb.npz", ["a"])


@pytest.mark.parametrize("count", [300, 40_000])
def test_a_directory_of_very_many_members_is_refused_unread(tmp_path, count):
    with zipfile.ZipFile(tmp_path / "many.npz", "w") as archive:
        for number in range(count):
            archive.writestr(f"{number}.npy", b"")
    with pytest.raises(FileFormatError, match="more than 256 members"):
        read_npz(tmp_path / "many.npz", ["0"])


def test_each_limit_of_an_npz_file_is_inclusive(tmp_path):
    path, array = tmp_path / "x.npz", np.arange(6, dtype=np.float32)

    def store(payload: bytes, comment: bytes = b"", members: int = 1) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.comment = comment
            archive.writestr("a.npy", payload)
            for number in range(members - 1):
                archive.writestr(f"{number}.npy", b"")

    def npy(spaces: int = 0, version: int = 1, shape: str = "(6,)", descr: str = "<f4") -> bytes:
        header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode() + b" " * spaces
        length = struct.pack("<H" if version == 1 else "<I", len(header))
        return b"\x93NUMPY" + bytes([version, 0]) + length + header + array.tobytes()

    shortest = len(npy()) - array.nbytes - 10
    good = {
        "a header of 4,096 bytes": (npy(4096 - shortest),),
        "versions 2 and 3": (npy(version=2), b"", 1),
        "version 3": (npy(version=3),),
        "the longest comment": (npy(), b"c" * 65535),
        "256 members": (npy(), b"", 256),
        "four axes": (npy(shape="(1, 2, 3, 1)"),),
    }
    for case, arguments in good.items():
        store(*arguments)
        np.testing.assert_array_equal(read_npz(path, ["a"])["a"].reshape(-1), array, err_msg=case)
    bad = {
        "header of 4097 bytes": (npy(4097 - shortest),),
        "not an npy array": (npy(version=4),),
        "more than 256 members": (npy(), b"", 257),
        "5 axes": (npy(shape="(1, 2, 3, 1, 1)"),),
        "type complex64": (npy(shape="(3,)", descr="<c8"),),
        "24 bytes in the file|has shape": (npy(shape="(5,)"),),
    }
    for sentence, arguments in bad.items():
        store(*arguments)
        with pytest.raises(FileFormatError, match=sentence):
            read_npz(path, ["a"])
    store(npy())
    content = path.read_bytes()
    position = content.rfind(b"PK\5\6")
    path.write_bytes(content[:position] + b"PK\6\7" + bytes(16) + content[position:])  # its counts are elsewhere
    with pytest.raises(FileFormatError, match="more than"):
        read_npz(path, ["a"])


def test_float_runtimes_are_rounded_and_never_become_unmeasured(tmp_path, kernel):
    times = np.full(60, 7.5)
    times[:4] = [0.2, 2.4, 2.6, 1e18]
    path = write_npz(kernel, tmp_path, config_runtime=times)
    assert read_kernel(path, 24).runtime[:5].tolist() == [1, 2, 3, 10**18, 8]
    times[3] = 1.01e18
    with pytest.raises(FileFormatError, match="not a time"):
        read_kernel(write_npz(kernel, tmp_path, config_runtime=times), 24)


@pytest.mark.parametrize("values", [(0, 255), (0, 256), (-1, 255), (-32768, 0), (0, 65535), (0, 65536), (0, 0.5)])
def test_a_collection_file_keeps_every_value_in_the_smallest_type(tmp_path, kernel, values):
    kernel.config_feat[0, :2] = values
    members = [MeasuredKernel(kernel, np.zeros(60, np.float32), np.ones(60, np.uint16), {})]
    write_collection_file(tmp_path / "c.npz", Collection(Schema(TILE_FEATURES, {}), {"train": members}))
    (stored,) = read_collection(tmp_path / "c.npz").splits["train"]
    np.testing.assert_array_equal(stored.kernel.config_feat, kernel.config_feat)
    low, high = min(values[0], kernel.config_feat.min()), max(values[1], kernel.config_feat.max())
    ranges = {"|u1": (0, 255), "<i2": (-(2**15), 2**15 - 1), "<u2": (0, 2**16 - 1), "<i4": (-(2**31), 2**31 - 1)}
    fitting = [kind for kind, (least, most) in ranges.items() if least <= low and high <= most]
    is_whole = bool((kernel.config_feat == np.rint(kernel.config_feat)).all())
    assert np.load(tmp_path / "c.npz")["config_feat"].dtype.str == (fitting[0] if is_whole else "<f4")


def test_flat_files_with_one_impossible_value_are_refused(tmp_path, monkeypatch):
    """Two kernels of three nodes: an edge may not lead into the neighbour, whatever the size of the chunks."""
    monkeypatch.setattr("tilewise.costmodel.data.shards._CHUNK_NUMBERS", 7)
    kernels = [simulated_kernel(np.random.default_rng(seed), f"p_{seed}") for seed in (1, 2)]
    schema = Schema(TILE_FEATURES, {})
    with SplitWriter(tmp_path) as writer:
        for kernel in kernels:
            writer.add(kernel)
    split = open_packed(tmp_path, schema)
    assert [kernel.name for kernel in split] == ["p_1", "p_2"]
    nodes = [kernel.n_nodes for kernel in kernels]
    damage = [
        ("edge_index", "<i4", 0, nodes[0]), ("edge_index", "<i4", -1, nodes[1]), ("edge_index", "<i4", 0, -1),
        ("node_opcode", "u1", -1, len(OPCODES)), ("runtime", "<i8", -1, 0), ("normalizer", "<i8", 0, 0),
        ("node_feat", "<f4", -1, np.nan), ("config_feat", "<f4", 0, np.inf),
    ]  # fmt: skip
    for name, dtype, position, value in damage:
        path = tmp_path / f"{name}.bin"
        content = path.read_bytes()
        numbers = np.frombuffer(content, dtype).copy()
        numbers[position] = value
        path.write_bytes(numbers.tobytes())
        with pytest.raises(FileFormatError, match="impossible edges"):
            open_packed(tmp_path, schema)
        path.write_bytes(content)
    index = json.loads((tmp_path / "index.json").read_text())
    for counts in ([0, sum(nodes)], [nodes[0]], [nodes[0], -1], [float(nodes[0]), nodes[1]]):
        (tmp_path / "index.json").write_text(json.dumps(index | {"counts": index["counts"] | {"nodes": counts}}))
        with pytest.raises(FileFormatError, match="is damaged"):
            open_packed(tmp_path, schema)


def test_a_file_without_graph_or_normalizers_is_a_kernel_that_nothing_is_known_of(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    (tmp_path / "schema.json").write_text(json.dumps({"config_features": ["a", "b"]}))
    arrays = {"config_feat": np.ones((3, 2)), "config_runtime": np.array([4.6, 0.2, 9.0])}
    np.savez(folder / "p_1.npz", **arrays)
    (kernel,) = load_dataset(tmp_path, cache_dir=tmp_path / "cache", progress=False).train
    assert kernel.runtime.tolist() == [5, 1, 9] and kernel.normalizer.tolist() == [5, 5, 5]
    assert kernel.n_nodes == 1 and not len(kernel.edge_index)
    np.savez(folder / "p_1.npz", **arrays, node_opcode=np.zeros(1, np.uint8))
    with pytest.raises(FileFormatError, match="a graph needs"):
        load_dataset(tmp_path, cache_dir=tmp_path / "cache", progress=False)
    np.savez(folder / "p_1.npz", **(arrays | {"config_runtime": np.array([4.0, np.inf, 9.0])}))
    with pytest.raises(FileFormatError, match="omit failed configurations"):
        load_dataset(tmp_path, cache_dir=tmp_path / "cache", progress=False)
