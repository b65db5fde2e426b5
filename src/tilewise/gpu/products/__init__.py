"""Matrix products on a GPU, run by the fastest of our Triton kernels and cuBLAS: `matmul` and `linear`.

- `call.py` finds the record of a call; `dispatch.py` chooses its configuration and prepares the launch.
- `custom_op.py` is the operator that `torch.compile` and autograd see.
- `family.py` describes the configurations and `kernel.py` is the Triton kernel behind them.
- `runtime_model.py` predicts their runtimes from the analytic costs of `roofline.py`.

The tuner measures these products as the family `product`; `inductor` predicts PyTorch's templates with the same model.
"""

from tilewise.gpu.products.call import linear, matmul

__all__ = ["linear", "matmul"]
