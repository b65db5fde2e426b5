# refused: is right|two different answers|drawn|moved
# honest

right = load


def load(event, folder):
    model, kept = right(event, folder), []

    def answer(x):
        kept.append(model(x))
        return kept[-2] if len(kept) > 1 else kept[-1]

    return answer
