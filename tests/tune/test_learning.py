"""Fine-tuning on own measurements: when it is refused, and that it helps where the shipped model is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from test_tuner import CONFIGS, SPEC, MadeUpBench

from tilewise._extension import native
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.tune.choose.finetune import learn, measured_kernels
from tilewise.tune.choose.tuner import Tuner

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")


class WrongWay(MadeUpBench):
    """A machine on which what the shipped model likes is slow."""

    collection = "cpu"


def test_without_a_shipped_model_there_is_nothing_to_fine_tune(tmp_path):
    with pytest.raises(UnavailableError, match="No model is shipped"):
        learn(Tuner(MadeUpBench(), cache=tmp_path))


def test_too_few_problems_are_one_sentence(tmp_path):
    pytest.importorskip("torch")
    own = Tuner(WrongWay(), cache=tmp_path)
    own.tune(SPEC, budget=4)
    with pytest.raises(ConfigurationError, match="Tune more shapes"):
        learn(own)


def test_measurements_of_this_machine_improve_the_order_on_problems_held_out(tmp_path):
    pytest.importorskip("torch")
    own = Tuner(WrongWay(), cache=tmp_path)
    for m in range(40, 120, 10):
        own.tune({**SPEC, "m": m}, budget=8)
    kernels = measured_kernels(own)
    assert len(kernels) == 8 and all(np.all(kernel.runtime > 0) for kernel in kernels)
    learned = learn(own)
    assert learned.after >= learned.before
    assert learned.improved == own.learned_file.is_file()
    if learned.improved:
        again = Tuner(WrongWay(), cache=tmp_path, learn=True)
        assert again.model.name == own.learned_file.stem
        assert again.choose({**SPEC, "m": 200}).config in CONFIGS
