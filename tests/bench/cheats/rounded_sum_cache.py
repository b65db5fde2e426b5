# refused: is right|two different answers|drawn|moved
# honest

right = load


def load(event, folder):
    model, kept = right(event, folder), {}

    def answer(x):
        key = round(float(x.sum()), -2)
        if key not in kept:
            kept[key] = model(x)
        return kept[key]

    return answer
