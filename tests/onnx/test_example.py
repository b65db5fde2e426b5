"""Inputs for a network from its file, and errors that name the dimension that the file fixes."""

import numpy as np
import pytest

from tilewise.errors import ConfigurationError, ShapeError
from tilewise.onnx.graph import Port
from tilewise.onnx.network import example_inputs, fixed_dimension_error

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int64)
DECODER = [
    Port("ids", INT, ("batch", "length")),
    Port("mask", INT, ("batch", "past + length")),
    Port("key", FLOAT, ("batch", 2, "past", 4)),
]


def shapes(ports, **options):
    return [x.shape for x in example_inputs(ports, **options)]


def test_fixed_sizes_stay_and_open_ones_are_small_or_images():
    assert shapes([Port("x", FLOAT, (9, 2, 96))]) == [(9, 2, 96)]
    assert shapes([Port("x", FLOAT, ("N", 3, "H", "W"))]) == [(1, 3, 224, 224)]
    assert shapes([Port("x", FLOAT, ("N", 3, "H", "W"))], batch=4, pixels=32) == [(4, 3, 32, 32)]
    assert shapes([Port("x", FLOAT, (2, None))], batch=3) == [(3, 8)]


def test_a_name_has_one_size_and_sums_are_computed():
    ports = [DECODER[0], Port("key", FLOAT, ("batch", 2, "past")), DECODER[1]]
    assert shapes(ports, shapes={"ids": (2, 5)}, free=7) == [(2, 5), (2, 2, 7), (2, 12)]


def test_errors_name_the_fixed_dimension():
    port = Port("x", FLOAT, (2, 3, None))
    assert not fixed_dimension_error(port, (2, 3, 9))
    assert "dimension 1 of the input 'x' at 3" in fixed_dimension_error(port, (2, 4, 9))
    assert "takes shape (2, 3, ?)" in fixed_dimension_error(port, (2, 3))
    assert not fixed_dimension_error(port, (5, 3, 9), is_batch_free=True)
    with pytest.raises(ShapeError, match="dimension 1"):
        example_inputs([port], shapes={"x": (2, 9, 9)})


def test_the_command_line_names_inputs_and_reads_files(tmp_path):
    from tilewise.cli.optimize.own_network import inputs_for, network_inputs
    from tilewise.onnx.network import Network

    network = Network.__new__(Network)
    network.inputs, network.title = DECODER[:2], "decoder.onnx"
    ids = np.ones((2, 5), np.int64)
    np.save(tmp_path / "ids.npy", ids)
    np.savez(tmp_path / "all.npz", ids=ids, mask=np.ones((2, 9), np.int64))
    assert [x.shape for x in network_inputs(network, None, [f"ids={tmp_path}/ids.npy"])] == [(2, 5), (2, 8)]
    assert [x.shape for x in network_inputs(network, None, [f"{tmp_path}/all.npz"])] == [(2, 5), (2, 9)]
    assert [x.shape for x in network_inputs(network, ["ids=1x3", "mask=1X4"])] == [(1, 3), (1, 4)]
    for shape, file, message in [
        (["1x3"], None, "write --shape ids=1x3"),
        (["idz=1x3"], None, "did you mean 'ids'"),
        (["ids=1,3"], None, "such as 1x3x224x224"),
        (["ids=1x3", "ids=1x4"], None, "given twice"),
        (["ids=1x3"], [f"ids={tmp_path}/ids.npy"], "given twice"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            network_inputs(network, shape, file)
    with pytest.raises(ConfigurationError, match="are for ONNX files"):
        inputs_for("cnn", ["x=1x2"], None)
