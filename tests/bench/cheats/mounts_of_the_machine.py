# refused: No such file
def load(event, folder):
    raise RuntimeError(open("/proc/self/mountinfo").read())
