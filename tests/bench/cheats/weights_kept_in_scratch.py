# harmless, memory below 0.88: the scratch folder counts as a whole
# honest

from pathlib import Path

Path("/tmp/kept").write_bytes(bytes(512 << 10))
