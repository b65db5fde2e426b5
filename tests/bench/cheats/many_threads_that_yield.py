# harmless: processor time between questions is part of the time of the answers
import os
import threading

# honest


def give_way():
    while True:
        os.sched_yield()


for _ in range(20):
    threading.Thread(target=give_way, daemon=True).start()
