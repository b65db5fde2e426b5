# refused: ended while no question was open|gave no answer
import fcntl
import os

# honest

fcntl.fcntl(3, fcntl.F_SETFL, os.O_NONBLOCK)  # the host's loop gets an error in place of a question
