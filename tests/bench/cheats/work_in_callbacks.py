# harmless: processor time between questions is part of the time of the answers
import gc
import hashlib
import threading
import time

# honest

work = bytes(1 << 20)
gc.callbacks.append(lambda *_: hashlib.sha256(work))


def often():
    while True:
        time.sleep(2e-4)
        gc.collect()


threading.Thread(target=often, daemon=True).start()
