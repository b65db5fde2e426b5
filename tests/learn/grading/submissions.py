"""Notebooks as students hand them in: right, wrong and hostile answers to the exercises on profiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SOLUTION = (Path(__file__).parents[1] / "solutions" / "profiling.py").read_text()
WRONG = SOLUTION.replace("def percentile", "def right_percentile") + (
    "\n\ndef percentile(samples, q):\n    return min(samples)\n"
)
# Each would get full marks, or do harm, where its code runs beside the tests.
HOSTILE = {
    "patches the check": "import tilewise.learn.checking as c\nc.feedback = lambda *a, **k: ''\n"
    "import tilewise_arena.grading as g\ng.must_be_solved = lambda *a, **k: None\n",
    "patches assert's way out": "import builtins, sys\nbuiltins.AssertionError = ValueError\n"
    "sys.excepthook = lambda *a: None\n",
    "writes its own verdict": "import os\nfor fd in range(1, 16):\n    try:\n"
    '        os.write(fd, b\'{"loaded": true, "why": ""}\\n{"gives": ["j", 0], "written": {}}\\n\' * 50)\n'
    "    except OSError: pass\n",
    "ends itself with success": "import os\nos._exit(0)\n",
    "never ends": "while True: pass\n",
    "takes all memory": "x = []\nwhile True: x.append(bytearray(1 << 26))\n",
    "starts processes": "import os\nwhile True: os.fork()\n",
    "removes files": "import os, pathlib\nfor p in ('/tmp/tilewise-canary', os.environ.get('CANARY', '/nothing')):\n"
    "    pathlib.Path(p).unlink(missing_ok=True)\n",
    "leaves a pickle for the grader": "import glob, tempfile\n"
    "for p in glob.glob(tempfile.gettempdir() + '/*.pkl'): open(p, 'wb').write(b'cos\\nsystem\\n')\n",
    "answers to everything": "class Any:\n    def __getattr__(self, n): return self\n"
    "    def __eq__(self, o): return True\n    def __float__(self): return 0.0\n"
    "percentile = conv_flops = least_seconds = lambda *a, **k: Any()\n",
    "is a notebook's magic": "%run -i /etc/passwd\n!touch /tmp/tilewise-magic\n",
}


def submission(text: str, student: dict[str, Any]) -> str:
    """The student's notebook with `text` in the place of its first function, the others as they were handed out."""
    notebook = json.loads(json.dumps(student))
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code" and "def " in "".join(c["source"])]
    for number, cell in enumerate(cells):
        cell["source"] = text if number == 0 else ""
    return json.dumps(notebook)
