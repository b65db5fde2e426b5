# refused: two different answers|is right|drawn|correlate
# honest
right = load


def load(event, folder):
    """Answer half of the rows from the model, and the others as the question before them."""
    model, last = right(event, folder), []

    def answer(x):
        half = model(x[:16])
        result = np.concatenate([half, last[-1] if last else half])
        last[:] = [half]
        return result

    return answer
