# refused: Operation not permitted
import os

# honest
held = os.open("/tmp", os.O_RDWR | os.O_TMPFILE)
