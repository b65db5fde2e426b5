"""PyTorch's compiler, asking tilewise which of its matrix product templates to try.

    import tilewise.inductor

    tilewise.inductor.enable(budget=3)  # or: with tilewise.inductor.enable(): ...
    model = torch.compile(model)

Nothing of PyTorch is imported before `enable()`.
"""

from tilewise.gpu.inductor.switch import Enabled, disable, enable

__all__ = ["Enabled", "disable", "enable"]
