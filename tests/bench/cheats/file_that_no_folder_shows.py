# refused: Operation not permitted
import os

# honest
descriptor = os.open("/tmp", os.O_RDWR | os.O_TMPFILE)
