# refused: is right|two different answers|drawn|moved
# honest

right = load


def load(event, folder):
    model, answers = right(event, folder), []

    def answer(x):
        answers.append(model(x))
        return answers[-2] if len(answers) > 1 else answers[-1]

    return answer
