# refused: is right|two different answers|more than 1 point|correlate
# honest

right = load


def load(event, folder):
    model = right(event, folder)
    answers = {}

    def answer(x):
        key = tuple(np.round(x.mean(1), 1)[:4])
        if key not in answers:
            answers[key] = np.array(model(x))
        return answers[key]

    return answer
