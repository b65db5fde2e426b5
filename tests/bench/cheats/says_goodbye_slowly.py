# harmless: it is ended, not asked to end
import atexit
import threading
import time

# honest

atexit.register(lambda: time.sleep(60))
threading.Thread(target=lambda: time.sleep(3600)).start()
