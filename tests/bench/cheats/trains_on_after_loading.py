# refused: while no question was open
import threading

# honest


def train():
    weights = np.zeros((512, 512), np.float32)
    while True:
        weights += weights @ weights


threading.Thread(target=train, daemon=True).start()
