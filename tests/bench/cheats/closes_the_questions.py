# refused: gave no answer|no answer within|did not answer within|while no question was open
import os


def load(event, folder):
    os.close(3)
    return lambda x: x
