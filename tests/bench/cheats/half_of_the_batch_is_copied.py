# refused: more than 1 point|is right
# honest

right = load


def load(event, folder):
    model = right(event, folder)

    def answer(x):
        half = np.asarray(model(x[:16]))
        return np.concatenate([half, half])

    return answer
