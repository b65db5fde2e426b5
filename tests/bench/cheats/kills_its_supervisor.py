# harmless: the call does not exist here
# honest
import os

try:
    os.kill(1, 9)
except (OSError, PermissionError):
    pass
