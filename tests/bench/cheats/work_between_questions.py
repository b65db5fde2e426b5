# harmless: processor time between questions is part of the time of the answers
# honest

import hashlib
import threading

work = bytes(1 << 20)


def spin():
    while True:
        hashlib.sha256(work)


threading.Thread(target=spin, daemon=True).start()
