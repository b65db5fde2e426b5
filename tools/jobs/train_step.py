"""train a network for one step"""

import numpy as np

from tilewise import Tensor, nn, optim


def run() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy(model(Tensor(np.ones((2, 8), np.float32))), np.array([0, 1]))
    loss.backward()
    optimizer.step()
