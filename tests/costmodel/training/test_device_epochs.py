"""Epochs on the device give the batches, losses and steps of the host, here with the CPU as the device."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from course.synthetic_tiles import synthetic_dataset  # noqa: E402
from tilewise.costmodel.models.torch import score_inputs  # noqa: E402
from tilewise.costmodel.models.torch.ragged import collate  # noqa: E402
from tilewise.costmodel.training.config import default_settings  # noqa: E402
from tilewise.costmodel.training.device_epochs import DeviceEpochs  # noqa: E402
from tilewise.costmodel.training.loop import TrainingRun  # noqa: E402
from tilewise.costmodel.training.losses import parse_losses  # noqa: E402
from tilewise.costmodel.training.sampling import slate_positions  # noqa: E402


def make_run() -> TrainingRun:
    settings = default_settings("TileRanker", batch=5, configs=24, model_kwargs={"hidden_dim": 16, "dropout": 0.0})
    return TrainingRun(synthetic_dataset(13, 2, n_configs=40), settings, "cpu", None)


@pytest.fixture(scope="module")
def run() -> TrainingRun:
    return make_run()


def test_a_gathered_batch_scores_like_one_collated_on_the_host(run: TrainingRun) -> None:
    steps = DeviceEpochs(run, capture=False)
    kernels = torch.tensor([3, 0, 7, 12])
    positions = torch.arange(24)[None].repeat(4, 1)
    batch = steps.split.gather(kernels, positions)
    orders = [np.argsort(run.inputs.target(int(k)), kind="stable")[:24] for k in kernels]
    targets = [run.inputs.target(int(k), order) for k, order in zip(kernels, orders, strict=True)]
    host = collate([run.inputs.rows(int(k), o) for k, o in zip(kernels, orders, strict=True)], targets)
    torch.testing.assert_close(batch.mask[:, : host.mask.shape[1]], host.mask)
    ours, theirs = run.module(batch), run.module(host)
    torch.testing.assert_close(ours.movedim(1, 2)[batch.mask], theirs.movedim(1, 2)[host.mask], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_losses_on_the_device_are_those_of_the_host(spread: float) -> None:
    rng = np.random.default_rng(0)
    scores = torch.tensor(spread * rng.standard_normal((4, 3, 9)))
    target, mask = torch.tensor(np.sort(rng.uniform(1, 3, (4, 9)))), torch.ones(4, 9, dtype=torch.bool)
    mask[1, 5:] = False
    loss = parse_losses("FastestFirst:1,LogMSE:0.3")
    members = [np.repeat(x.numpy(), 3, axis=0) for x in (target, mask)]
    value, grad = loss.with_gradient(scores.flatten(0, 1).numpy(), *members)
    device_value, device_grad = loss.on_device(scores, target, mask)
    assert device_value.item() == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(device_grad.flatten(0, 1).numpy(), grad, atol=1e-6)
    assert not parse_losses("ListMLELoss:1").has_tensor_form


def test_a_step_on_the_device_has_the_gradients_of_the_host() -> None:
    run = make_run()
    steps = DeviceEpochs(run, capture=False)
    steps.kernels.copy_(torch.tensor([3, 0, 7, 12, 5]))
    steps.positions.copy_(torch.arange(24)[None].repeat(5, 1))
    run.module.train()
    before = run.optimizer.values.clone()
    orders = [np.argsort(run.inputs.target(int(k)), kind="stable")[:24] for k in steps.kernels]
    targets = [run.inputs.target(int(k), order) for k, order in zip(steps.kernels, orders, strict=True)]
    inputs = [run.inputs.rows(int(k), order) for k, order in zip(steps.kernels, orders, strict=True)]
    run.optimizer.zero_grad()
    run._learn(collate(inputs, targets, "cpu"), inputs, targets)
    host_grads = run.optimizer.grads.clone()
    run.optimizer.prepare_device_step()
    run.optimizer.clip_norm = None
    steps._step()
    torch.testing.assert_close(run.optimizer.grads, host_grads, atol=1e-5, rtol=1e-3)
    assert not torch.equal(run.optimizer.values, before)


def test_slates_hold_the_fastest_and_no_configuration_twice() -> None:
    counts, uniform = np.array([10, 30, 1000]), np.random.default_rng(0).random((3, 16))
    positions = slate_positions(counts, uniform, 0.25)
    np.testing.assert_array_equal(positions, slate_positions(torch.tensor(counts), torch.tensor(uniform), 0.25).numpy())
    assert (positions[0] == np.arange(16)).all()
    for row, count in zip(positions[1:], counts[1:], strict=True):
        assert list(row[:4]) == [0, 1, 2, 3] and len(set(row)) == 16 and row.max() < count


def test_an_epoch_on_the_device_learns(run: TrainingRun) -> None:
    run.device_epochs = DeviceEpochs(run, capture=False)
    losses = [run._train_epoch(epoch)["train_loss"] for epoch in range(6)]
    assert losses[-1] < losses[0] and run.optimizer.step_count == 6 * 33


def test_validation_together_scores_like_kernel_by_kernel(run: TrainingRun) -> None:
    run.module.eval()
    together = DeviceEpochs(run, capture=False).validation_scores()
    for index, scores in enumerate(together):
        alone = score_inputs(run.module, run.validation.inputs(index))
        np.testing.assert_allclose(scores, alone, atol=1e-4, rtol=1e-4)
    assert len(together) == len(run.validation)
