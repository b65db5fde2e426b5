"""The engine: what is recorded, what is refused, and what memory is shared."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import gradcheck
from tilewise.errors import GradientError, ShapeError, TilewiseError


def leaf(*values: float) -> tw.Tensor:
    return tw.Tensor(list(values), requires_grad=True)


def test_gradients_add_up_over_uses_and_over_backward_calls():
    x = leaf(2.0)
    (x * x + x).sum().backward()
    (3 * x).sum().backward()
    np.testing.assert_array_equal(x.grad, [8.0])


def test_nothing_is_recorded_under_no_grad():
    x = leaf(1.0)
    with tw.no_grad():
        assert not (x * 2).requires_grad
        with tw.enable_grad():
            assert (x * 2).requires_grad
    assert (x * 2).requires_grad

    @tw.no_grad()
    def quietly() -> bool:
        return (x * 2).requires_grad

    assert not quietly()
    assert not quietly()


def test_no_grad_ends_when_an_exception_leaves_it():
    with pytest.raises(ShapeError), tw.no_grad():
        leaf(1.0, 2.0) + leaf(1.0, 2.0, 3.0)
    assert tw.is_grad_enabled()


def test_detach_shares_memory_but_no_gradient():
    x = leaf(1.0, 2.0)
    y = (x * 2).detach()
    assert not y.requires_grad
    d = x.detach()
    d.data[0] = 7
    assert x.data[0] == 7


def test_only_leaves_keep_gradients_unless_told():
    x = leaf(1.0, 2.0)
    doubled, other = x * 2, x * 3
    doubled.retain_grad()
    (doubled * other).sum().backward()
    np.testing.assert_array_equal(doubled.grad, other.data)
    assert other.grad is None


def test_gradients_of_two_leaves_never_share_memory():
    a, b = leaf(1.0, 2.0), leaf(3.0, 4.0)
    (a + b).sum().backward()
    a.grad.data[0] = 9
    assert b.grad.data[0] == 1


def test_an_input_that_needs_no_gradient_gets_none():
    x, w = tw.Tensor([1.0, 2.0]), leaf(3.0, 4.0)
    (x * w).sum().backward()
    assert x.grad is None
    np.testing.assert_array_equal(w.grad, [1, 2])


def test_backward_of_many_numbers_needs_a_gradient_of_their_shape():
    y = leaf(1.0, 2.0) * 2
    with pytest.raises(GradientError):
        y.backward()
    with pytest.raises(ShapeError):
        y.backward(np.ones(3, np.float32))
    with pytest.raises(GradientError):
        tw.Tensor([1.0]).backward()


def test_a_graph_can_be_walked_twice_only_if_it_was_kept():
    x = leaf(3.0)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_array_equal(x.grad, [12.0])
    with pytest.raises(GradientError, match="retain_graph"):
        y.backward()


IN_PLACE = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(2),
    "+=": lambda t: t.__iadd__(1),
    "[]=": lambda t: t.__setitem__(0, 5.0),
    "copy_": lambda t: t.copy_(np.zeros(2, np.float32)),
    "zero_": lambda t: t.zero_(),
}
SAVERS = {
    "exp_saves_its_result": lambda x: (lambda y: (y, y.sum()))(x.exp()),
    "mul_saves_its_inputs": lambda x: (lambda y: (y, (y * y).sum()))(x + 0),
    "softmax_saves_its_result": lambda x: (lambda y: (y, y[0]))(x.softmax(0)),
}


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("saver", SAVERS)
def test_backward_refuses_when_a_saved_value_was_changed_in_place(saver, change):
    changed, loss = SAVERS[saver](leaf(1.0, 2.0))
    with tw.no_grad():
        IN_PLACE[change](changed)
    with pytest.raises(GradientError, match="in place"):
        loss.backward()


def test_backward_refuses_when_a_view_of_a_saved_value_was_changed():
    x = leaf(1.0, 2.0)
    y = x + 0
    loss = (y * y).sum()
    y.detach().reshape(2, 1).zero_()
    with pytest.raises(GradientError, match="in place"):
        loss.backward()


def test_changing_what_no_gradient_needs_is_allowed():
    x = leaf(1.0, 2.0)
    y = x + 1
    z = (y * 3).sum()
    with tw.no_grad():
        y.add_(1)
    z.backward()
    np.testing.assert_array_equal(x.grad, [3, 3])


def test_changes_in_place_are_part_of_the_graph_as_in_pytorch():
    def program(x, other):
        y = x * 2
        y += other
        y[0] = other[1] * 3
        return y.sum()

    values = [np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)]
    ours = [tw.Tensor(v, requires_grad=True) for v in values]
    theirs = [torch.tensor(v, requires_grad=True) for v in values]
    program(*ours).backward()
    program(*theirs).backward()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.grad, b.grad)


def test_a_leaf_that_requires_a_gradient_cannot_be_changed_while_recording():
    x = leaf(1.0)
    with pytest.raises(GradientError):
        x += 1
    with tw.no_grad():
        x -= 0.5
    assert x.data[0] == 0.5
    assert x.requires_grad


def test_using_a_view_whose_base_was_changed_is_refused():
    x = leaf(1.0, 2.0)
    y = x * 2
    view = y[:1]
    y.mul_(3)
    with pytest.raises(GradientError, match="shares its memory"):
        view * 1


def test_a_finished_graph_frees_its_arrays_without_the_garbage_collector():
    gc.disable()
    try:
        x = leaf(1.0, 2.0)
        y = x.exp()
        watched = weakref.ref(y)
        loss = (y * y).sum()
        del y
        loss.backward()
        assert watched() is None
    finally:
        gc.enable()


def test_very_long_chains_do_not_recurse():
    x = leaf(1.0)
    y = x
    for _ in range(5000):
        y = y + 0.001
    y.backward()
    np.testing.assert_array_equal(x.grad, [1.0])


def test_gradients_take_the_dtype_of_their_tensor():
    a = tw.Tensor([1.0], requires_grad=True)
    b = tw.Tensor([2.0], requires_grad=True, dtype=np.float64)
    (a * b).sum().backward()
    assert a.grad.dtype == np.float32
    assert b.grad.dtype == np.float64


def test_asarray_is_a_writable_view_and_wrapping_an_array_copies_nothing():
    array = np.zeros(3, np.float32)
    t = tw.Tensor(array)
    np.asarray(t)[1] = 5
    assert array[1] == 5
    assert np.asarray(t) is array
    assert np.shares_memory(t[1:].data, array)


def test_arrays_on_the_left_give_tensors():
    t = leaf(1.0, 2.0)
    for result in (np.ones(2, np.float32) + t, np.ones(2, np.float32) @ t, 2 - t, np.float32(2) / t):
        assert isinstance(result, tw.Tensor)
        assert result.requires_grad


def test_dlpack_shares_memory_with_pytorch_both_ways():
    t = tw.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3).T)
    there = torch.from_dlpack(t)
    there[0, 0] = 42
    assert t.data[0, 0] == 42
    back = tw.from_dlpack(there)
    back.data[1, 1] = 7
    assert there[1, 1] == 7
    assert back.shape == (3, 2)
    with pytest.raises(TilewiseError):
        tw.from_dlpack(object())
    with pytest.raises(TilewiseError):
        tw.from_dlpack(torch.ones(2, requires_grad=True))


def test_gradcheck_accepts_right_gradients_and_names_wrong_ones():
    x = tw.Tensor(np.random.default_rng(0).standard_normal((3, 2)), requires_grad=True)
    assert gradcheck(lambda t: (t.tanh() @ t.T).sum(), x)

    def wrong(t: tw.Tensor) -> tw.Tensor:
        return (t * t.detach()).sum()  # half of the gradient is cut off

    with pytest.raises(GradientError, match="gradient"):
        gradcheck(wrong, x)
