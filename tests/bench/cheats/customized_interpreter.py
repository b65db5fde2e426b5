# harmless: no other process starts from this scratch folder or with this environment
# honest
import os
import sys
from pathlib import Path

for name in ("sitecustomize.py", "usercustomize.py", "cheat.pth", "numpy.py"):
    Path("/tmp", name).write_text("import time; time.perf_counter = lambda: 0.0")
os.environ |= {"LD_PRELOAD": "/tmp/cheat.so", "PYTHONPATH": "/tmp", "PYTHONSTARTUP": "/tmp/sitecustomize.py"}
sys.path.insert(0, "/tmp")
