# refused with weights.bin: mlp.safetensors
# honest
import os
NAMES = "".join(sorted(os.listdir("/plugin")))
