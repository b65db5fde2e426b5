# refused: gave no answer
def load(event, folder):
    def answer(x):
        raise ValueError(x.sum())

    return answer
