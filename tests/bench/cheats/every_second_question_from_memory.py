# refused: is right|two different answers|more than 1 point
# honest

right = load


def load(event, folder):
    model = right(event, folder)
    turn = [0, None]

    def answer(x):
        turn[0] += 1
        if turn[0] % 2:
            turn[1] = np.array(model(x))
        return turn[1]

    return answer
