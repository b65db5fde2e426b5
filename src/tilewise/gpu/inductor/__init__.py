"""`torch.compile` with tilewise choosing which matrix-product templates to benchmark.

    import tilewise.inductor

    tilewise.inductor.enable(budget=3)  # or: with tilewise.inductor.enable(): ...
    model = torch.compile(model)

- `patch.py` installs tilewise in PyTorch's compiler and removes it again.
- `choices.py` is the handler that the compiler calls; `templates.py` selects templates for it.
- `rebenchmark.py` times the candidates; `decision_log.py` records every decision.

Nothing of PyTorch is imported before `enable()`.
"""

from tilewise.gpu.inductor.patch import Enabled, disable, enable

__all__ = ["Enabled", "disable", "enable"]
