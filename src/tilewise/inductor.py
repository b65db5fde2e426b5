"""`tilewise.inductor`: the public name of `tilewise.gpu.inductor`.

import tilewise.inductor

tilewise.inductor.enable(budget=3)
model = torch.compile(model)
"""

from tilewise.gpu.inductor import Enabled, disable, enable

__all__ = ["Enabled", "disable", "enable"]
