"""Damaged files and hostile paths for every reader: one sentence or a right result. `make fuzz` tries many more."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuzz.kept_files import RESUMED
from fuzz.readers import APART, noted, readers
from fuzz.runner import CORPUS, Outcome, run_target, try_one
from fuzz.targets import TARGETS
from tilewise.errors import TilewiseError

NEED_TORCH = ("scorer_", "torch_", "GBDT", "blended_model", "training_checkpoint")
# What cannot be read there is left alone.
OWN_SETTLING = ("machine_json", "tuning_json", "choices", "training_checkpoint", *RESUMED)
REACHED: dict[str, set[str]] = {}  # target: the readers that it went through


@pytest.fixture(autouse=True)
def _no_hanging() -> Iterator[None]:
    """Fail a test that computes for five minutes, or waits as long and computes nothing: others share the cores."""
    limit = 300  # seconds; arbitrary, hangs are endless
    used = [time.process_time()]

    def late(*_: object) -> None:
        used.append(time.process_time())
        if used[-1] - used[0] > limit or used[-1] - used[-2] < 0.1:
            raise AssertionError("it hangs")
        signal.alarm(limit)

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))


def check_known(name: str) -> None:
    if name.startswith(NEED_TORCH):
        pytest.importorskip("torch")
        pytest.importorskip("lightgbm")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_damaged_file_is_one_sentence_or_a_right_result(name: str, cache: None) -> None:
    check_known(name)
    with noted(REACHED.setdefault(name, set())):
        outcome = run_target(name, count=8, seed=0)
    assert not outcome.failures


@pytest.mark.filterwarnings("ignore")
def test_every_reader_of_the_package_has_a_target(cache: None) -> None:
    pytest.importorskip("fastapi")
    for name in sorted(TARGETS.keys() - REACHED.keys()):
        check_known(name)
        with noted(REACHED.setdefault(name, set())):
            run_target(name, count=0, seed=0)
    every = readers()
    missing = every - set().union(*REACHED.values()) - APART.keys()
    assert not missing, f"no target goes through {sorted(missing)}"
    assert sorted(APART.keys() - every) == [], "they read nothing, or are gone"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_once_escaped_no_longer_does(path: Path, tmp_path: Path, cache: None) -> None:
    check_known(path.parent.name)
    outcome = Outcome()
    target = TARGETS[path.parent.name](tmp_path)
    try_one(target, path.read_bytes(), outcome)
    target.close()
    assert not outcome.failures


def pipe(place: Path) -> None:
    os.mkfifo(place)


def loop(place: Path) -> None:
    place.symlink_to(place.name)


def link(target: str) -> Callable[[Path], None]:
    return lambda place: place.symlink_to(target)


def holes(place: Path) -> None:
    with place.open("wb") as stream:
        stream.truncate(1 << 40)


HOSTILE = {
    "a pipe": pipe,
    "a loop": loop,
    "an endless device": link("/dev/zero"),
    "a full device": link("/dev/full"),
    "a folder": lambda place: place.mkdir(),
    "a terabyte of holes": holes,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_is_no_file_is_one_sentence_to_every_reader(name: str, tmp_path: Path, cache: None) -> None:
    check_known(name)
    target = TARGETS[name](tmp_path)
    for kind, make in HOSTILE.items():
        with contextlib.suppress(FileNotFoundError):
            target.place.rmdir() if target.place.is_dir() and not target.place.is_symlink() else target.place.unlink()
        make(target.place)
        if name in OWN_SETTLING:
            target.use(target.place)
            continue
        with pytest.raises(TilewiseError) as caught:
            target.use(target.place)
        assert "\n" not in str(caught.value), kind
    target.close()


COMMANDS = (
    "fit gpt --epochs 1 --data {}",
    "fit mlp --epochs 1 --data {}",
    "quantize cnn --weights {}",
    "prune cnn --weights {}",
    "quantize cnn --data {}",
    "generate x --model {}",
    "profile {}",
    "run {}",
    "tiles describe {}",
    "tiles predict {} cpu",
    "tiles predict cpu {}",
    "tiles export {} out.safetensors",
    "tiles board cpu --models shipped --out {}",
    "tiles evaluate cpu {} --no-gbdt",
    "tiles from-pb {} --out pb",
    "tiles kaggle {}",
    "tiles kaggle p.csv --sample {}",
    "tiles score {} cpu",
    "tiles download --from {} --out data",
    "layout train {} --out m",
    "layout predict {} toy",
    "layout score {} --truth toy/npz/layout/xla/random/test",
    "collect cpu --shapes {} --out s.sqlite",
    "collect cpu --out {}",
    "collect export {} --out x",
    "collect compare {} {}",
    "tune --check {}",
    "tune matmul m=64 n=64 k=64 --model {}",
    "replay {}",
    "replay cpu --model {}",
    "check pruning --file {}",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_file_is_exit_code_2_to_every_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: None
) -> None:
    from tilewise.cli.app import main

    monkeypatch.chdir(tmp_path)
    for kind in ("a pipe", "a loop", "an endless device"):
        place = tmp_path / kind.replace(" ", "-")
        HOSTILE[kind](place)
        monkeypatch.setattr(sys, "argv", ["tilewise", *command.replace("{}", str(place)).split()])
        with pytest.raises(SystemExit) as exit_info:
            main()
        message = capsys.readouterr().err
        assert exit_info.value.code == 2, (kind, message)
        assert "Traceback" not in message
