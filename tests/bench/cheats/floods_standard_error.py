# harmless: what is said in vain is bounded, and holds up nobody
import sys
# honest
try:
    for _ in range(1 << 12):
        sys.stderr.write("x" * (1 << 13))
except OSError:
    pass
