# refused: no answer within|did not answer within
import time


def load(event, folder):
    time.sleep(1000)
