# refused: no answer within|did not answer within
def load(event, folder):
    while True:
        pass
