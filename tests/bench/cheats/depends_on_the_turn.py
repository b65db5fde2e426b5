# refused: two different answers
# honest

turn = [0]
right = load


def load(event, folder):
    model = right(event, folder)

    def answer(x):
        turn[0] += 1
        return model(x) + 0.05 * turn[0]

    return answer
