# refused: gave no answer
import os


def load(event, folder):
    return lambda x: os._exit(0)
