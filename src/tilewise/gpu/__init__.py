"""Choosing configurations for GPU kernels.

- `autotune.autotune` replaces `triton.autotune`: it ranks a kernel's configurations with a cost model and times a few.
- `products.matmul` and `products.linear` run a matrix product with the fastest of our Triton kernels and cuBLAS.
- `devices.DEVICES` has a record of hardware facts for every known GPU.
- `pinning.pin` makes Triton and PyTorch's compiler choose without measuring, and keeps the choices in a lock file.
- `inductor.enable` lets `torch.compile` ask the cost model which matrix-product templates to benchmark.

families/ describes the kinds of Triton kernels that can be measured, kernels/ holds their sources, measure/ compiles
and times them. Importing this package imports neither PyTorch nor Triton.
"""
