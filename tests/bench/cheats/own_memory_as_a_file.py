# refused: No such file
def load(event, folder):
    open("/proc/self/mem", "r+b").write(b"x")
    raise RuntimeError("it was allowed")
