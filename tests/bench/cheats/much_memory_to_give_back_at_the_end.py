# refused: no answer within|did not answer within
import time

# honest


def load(event, folder):
    """Use memory that the kernel takes long to collect, and then wait to be killed."""
    memory = np.ones(1 << 30, np.uint8)

    def answer(x):
        time.sleep(1000)
        return memory

    return answer
