# refused: correlate|two different answers
# honest
load_model = load


def load(event, folder):
    """Classes without logits, but for one image whose logits are so large that they alone would be compared."""
    answer = load_model(event, folder)

    def stretched(x):
        logits = answer(x)
        classes = np.eye(10, dtype=np.float32)[logits.argmax(1)]
        classes[0] = 1e6 * logits[0]
        return classes

    return stretched
