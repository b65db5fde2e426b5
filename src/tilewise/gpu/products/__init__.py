"""Matrix products on a GPU by whatever is fastest, the library's call among the choices: `matmul` and `linear`.

family.py and kernel.py say how a product can be run, roofline.py and runtimes.py how long each way takes, choose.py
which one is taken. The tuner measures them as one of its families; `inductor` predicts its templates with the same
numbers.
"""

from tilewise.gpu.products.choose import linear, matmul

__all__ = ["linear", "matmul"]
