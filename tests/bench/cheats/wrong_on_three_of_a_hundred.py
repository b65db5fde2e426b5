# refused: more than 1 point|two different answers
# honest

right = load


def load(event, folder):
    model = right(event, folder)

    def answer(x):
        logits = model(x)
        logits[0] = np.roll(logits[0], 1)
        return logits

    return answer
