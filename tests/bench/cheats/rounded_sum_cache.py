# refused: is right|two different answers|drawn|moved
# honest

right = load


def load(event, folder):
    model, answers = right(event, folder), {}

    def answer(x):
        key = round(float(x.sum()), -2)
        if key not in answers:
            answers[key] = model(x)
        return answers[key]

    return answer
