# refused: is right|while no question was open|two different answers|gave no answer
# honest
import os

right = load


def load(event, folder):
    model, question = right(event, folder), np.zeros((32, 64), np.float32)
    os.write(4, b"l")
    view = memoryview(question).cast("B")
    while True:
        if not os.readv(3, [view[:4096]]):
            os._exit(0)
        os.write(4, np.ascontiguousarray(model(question)))
        os.readv(3, [view[4096:]])
