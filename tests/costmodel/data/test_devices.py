"""Device cards: found by name, unknown fields allowed, and columns that any model reads."""

from __future__ import annotations

import json

import numpy as np
import pytest

from costmodel.data.importers.test_importers import t4
from tilewise.costmodel.data.dataset import load_dataset
from tilewise.costmodel.data.devices import DEVICE_COLUMNS, FIELDS, KNOWN, columns_of, find_card, known_name, read_cards
from tilewise.costmodel.data.importers import import_logs
from tilewise.errors import FileFormatError


def test_a_card_is_found_by_a_word_of_the_name():
    assert find_card("NVIDIA A100-PCIE-40GB") == KNOWN["A100"] == find_card("convolution_a100.T4.json.gz")
    assert known_name("RTX A4000") == "A4000" and known_name("GA1000") == "" and find_card("") == {}


def test_every_known_card_fills_every_column():
    for card in KNOWN.values():
        assert list(card) == list(FIELDS)
        values = columns_of(card)
        assert len(values) == len(DEVICE_COLUMNS) and all(value > 0 for value in values)


def test_what_is_not_known_is_zero_and_what_is_no_number_counts_as_unknown():
    assert columns_of({}) == (0.0,) * len(DEVICE_COLUMNS)
    card = {"vendor": "AMD", "warp": "many", "lanes": True, "clock_mhz": -1, "l2_kib": float("nan"), "odd": [1]}
    assert columns_of(card) == (2.0,) + (0.0,) * (len(DEVICE_COLUMNS) - 1)


def test_the_ridge_point_is_operations_for_a_byte():
    told = dict(zip(DEVICE_COLUMNS, columns_of(KNOWN["A100"]), strict=True))
    assert told["device_ridge"] == pytest.approx(19.5e12 / 1555e9, rel=0.01)
    assert told["device_tensor_ridge"] == pytest.approx(312e12 / 1555e9, rel=0.01)


def test_logs_of_two_devices_are_one_kernel_with_two_cards(tmp_path):
    for name in ("A100", "W7800"):
        (tmp_path / f"conv_{name}.T4.json").write_text(t4())
    logs = sorted(tmp_path.glob("*.json"))
    report = import_logs("kernel-tuner", logs, tmp_path / "out", split="train", device_columns=True)
    assert report.devices == ["A100", "W7800"]
    assert read_cards(tmp_path / "out" / "devices.json") == {name: KNOWN[name] for name in ("A100", "W7800")}
    data = load_dataset(tmp_path / "out", cache_dir=tmp_path / "cache", progress=False)
    assert data.schema.config_features[-len(DEVICE_COLUMNS) :] == DEVICE_COLUMNS
    assert sorted(kernel.program for kernel in data.train) == ["conv-A100", "conv-W7800"]
    for kernel in data.train:
        card = columns_of(KNOWN[kernel.program.partition("-")[2]])
        np.testing.assert_allclose(kernel.config_feat[:, -len(card) :], np.tile(card, (kernel.n_configs, 1)), rtol=1e-6)


def test_a_card_of_ones_own_comes_before_the_table(tmp_path):
    (tmp_path / "log.json").write_text(t4())
    mine = {"A100": {"multiprocessors": 98, "coolant": "water"}}
    import_logs("kernel-tuner", [tmp_path / "log.json"], tmp_path / "out", device="A100", cards=mine)
    assert read_cards(tmp_path / "out" / "devices.json")["A100"] == KNOWN["A100"] | mine["A100"]


@pytest.mark.parametrize(("device", "wanted"), [("abacus", True), ("A100", False)])
def test_a_device_adds_columns_only_where_it_is_known_and_they_are_asked_for(tmp_path, device, wanted):
    (tmp_path / "log.json").write_text(t4())
    out = tmp_path / "out"
    import_logs("kernel-tuner", [tmp_path / "log.json"], out, device=device, device_columns=wanted)
    assert read_cards(out / "devices.json") == {device: KNOWN.get(device, {})}
    schema = json.loads((tmp_path / "out" / "schema.json").read_text())
    assert not set(DEVICE_COLUMNS) & set(schema["config_features"])


@pytest.mark.parametrize("text", ["[]", '{"A100": 3}', "{", json.dumps({str(i): {} for i in range(1001)})])
def test_a_file_that_holds_no_cards_is_one_sentence(tmp_path, text):
    (tmp_path / "devices.json").write_text(text)
    with pytest.raises(FileFormatError, match=r"devices\.json"):
        read_cards(tmp_path / "devices.json")
