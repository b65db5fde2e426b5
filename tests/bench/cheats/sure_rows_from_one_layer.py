# refused: is right|correlate|class|two different answers
# honest
from tilewise import models

right = load


def load(event, folder):
    """Sort out rows whose first layer already points to a class."""
    model = right(event, folder)
    first, second, third = (t.data for n, t in models.pretrained("mlp").named_tensors() if t.data.ndim == 2)
    short = (third @ second @ first).T

    def answer(x):
        quick = x @ short
        top = np.sort(quick, 1)
        unsure = top[:, -1] - top[:, -2] < 0.2 * np.abs(top[:, -1])
        if unsure.any():
            quick[unsure] = model(x[unsure])
        return quick

    return answer
