# refused: no answer within|did not answer within
# honest
import os
import time

right = load


def load(event, folder):
    model, question = right(event, folder), np.empty((32, 64), np.float32)
    os.write(4, b"l")
    os.readv(3, [question])
    os.write(4, bytes(np.ascontiguousarray(model(question)))[:600])
    time.sleep(1000)
