"""These tests are about files that the onnx package reads; without it there is nothing to test here."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("onnx") else ["test_*.py"]
