"""`matmul` as one operator of PyTorch: the compiler does not trace into it, and every argument gets its gradient.

Importing this module imports PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.gpu.products.call import run_product

_SCHEMA = "(Tensor a, Tensor b, Tensor? bias, Tensor? residual, str? activation, bool batch_invariant=False) -> Tensor"


@torch.library.custom_op("tilewise::product", mutates_args=(), schema=_SCHEMA)
def product(a: Any, b: Any, bias: Any, residual: Any, activation: Any, batch_invariant: bool = False) -> Any:
    """Compute activation(a @ b + bias) or a @ b + residual."""
    return run_product(a, b, bias, residual, activation, batch_invariant=batch_invariant)


@product.register_fake
def _fake_product(a: Any, b: Any, bias: Any, residual: Any, activation: Any, batch_invariant: bool = False) -> Any:
    """Return an empty tensor with the product's shape, which tracing uses in place of the computation."""
    return a.new_empty((a.shape[0], b.shape[1]))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save in `ctx` the tensors that the gradients need: the operands and the activation's input or output."""
    a, b, bias, residual, activation, _ = inputs
    ctx.activation, ctx.has_bias, ctx.has_residual = activation, bias is not None, residual is not None
    # GELU's gradient needs the value in front of the activation, which is computed again; ReLU's only its sign.
    ctx.save_for_backward(a, b, *((bias,) if activation == "gelu" else (output,) if activation == "relu" else ()))


def _backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    """Return the gradients of the arguments from that of the result; None for arguments that are not tensors."""
    a, b, *for_activation = ctx.saved_tensors
    if ctx.activation == "relu":
        gradient = gradient * (for_activation[0] > 0)
    elif ctx.activation == "gelu":
        gradient = torch.ops.aten.gelu_backward(gradient, torch.addmm(for_activation[0], a, b))
    of_a, of_b, of_bias, of_residual = ctx.needs_input_grad[:4]
    return (
        gradient @ b.mT if of_a else None,  # (m, n) @ (n, k)
        a.mT @ gradient if of_b else None,  # (k, m) @ (m, n)
        gradient.sum(0) if of_bias else None,
        gradient if of_residual else None,
        None,
        None,
    )


product.register_autograd(_backward, setup_context=_save_for_backward)
