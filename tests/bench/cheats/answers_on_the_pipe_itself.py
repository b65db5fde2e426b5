# harmless: nothing is left out by it that the host's own loop does
# honest
import os

right = load


def load(event, folder):
    model, question = right(event, folder), np.empty((32, 64), np.float32)
    os.write(4, b"l")
    while os.readv(3, [question]):
        os.write(4, model(question))
    os._exit(0)
