# refused: Operation not permitted
import subprocess
import sys


def load(event, folder):
    subprocess.run([sys.executable, '-c', '1'], check=True)
    raise RuntimeError("it was allowed")
