# harmless: what lies in the scratch folder is memory
# honest

from pathlib import Path

Path("/tmp/kept").write_bytes(bytes(8 << 20))
