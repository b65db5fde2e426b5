# harmless: waiting is time that counts
# honest
import time

right = load


def load(event, folder):
    model = right(event, folder)

    def answer(x):
        time.sleep(0.002)
        return model(x)

    return answer
