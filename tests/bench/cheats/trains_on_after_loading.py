# harmless: processor time between questions is part of the time of the answers
import threading

# honest


def train():
    weights = np.zeros((512, 512), np.float32)
    while True:
        weights += weights @ weights


threading.Thread(target=train, daemon=True).start()
