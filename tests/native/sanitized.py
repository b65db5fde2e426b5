"""Runs tests on an extension built elsewhere, such as one with sanitizers in it: `python sanitized.py FOLDER TESTS...`,
or `python sanitized.py FOLDER stress --minutes 10` for the stress test beside this file.

The package of the environment is an editable one, whose finder comes before every path; here it steps aside.
"""

import os
import runpy
import sys
from pathlib import Path

import pytest

folder = Path(sys.argv[1]).resolve()
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, str(folder))
os.environ["PYTHONPATH"] = str(folder)

import tilewise  # noqa: E402 - not before the path is right

if not Path(tilewise.__file__).is_relative_to(folder):
    sys.exit(f"{tilewise.__file__} was imported, not the package in {folder}")
if sys.argv[2] == "stress":
    sys.argv[1:] = sys.argv[3:]
    runpy.run_path(str(Path(__file__).with_name("stress.py")), run_name="__main__")
# What a sanitizer says before it ends the process would be lost with what pytest holds back.
sys.exit(pytest.main(["-s", "-n", "0", "-p", "no:cacheprovider", "-x", *sys.argv[2:]]))
