# refused: while no question was open
# honest
import os

right = load


def load(event, folder):
    model, question = right(event, folder), np.empty((32, 64), np.float32)
    os.write(4, b"l")
    while os.readv(3, [question]):
        answer = bytes(np.ascontiguousarray(model(question)))
        os.write(4, answer + answer)
    os._exit(0)
