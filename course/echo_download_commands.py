"""Prints the shell commands that download and unpack the TpuGraphs tile dataset under ~/data/tpugraphs.

    python3 echo_download_commands.py | bash

Plain Python 3 and curl are enough; nothing of tilewise is needed. An interrupted download continues when the commands
are run again. `tilewise tiles download` does the same with checksums and without trusting the archives.
"""

from __future__ import annotations

import os

BASE_URL = "https://storage.googleapis.com/download.tensorflow.org/data/tpu_graphs/v0"
SPLITS = ("train", "valid", "test")


def commands() -> list[str]:
    lines = ["set -e", "mkdir -p ~/data/tpugraphs", "cd ~/data/tpugraphs"]
    for split in SPLITS:
        name = f"npz_tile_xla_{split}.tar"
        url = f"{BASE_URL}/{name}"
        lines += [
            f"echo '{name}:' $(curl -sIL {url} | tr -d '\\r' | awk 'tolower($1)==\"content-length:\"{{n=$2}} "
            'END{printf "%.0f MB", n/1e6}\')',
            f"[ -f {name} ] || {{ curl -fL --retry 5 -C - -o {name}.part {url} && mv {name}.part {name}; }}",
            f"tar -x --no-same-owner -f {name}",
        ]
    return lines


if __name__ == "__main__":
    try:
        print("\n".join(commands()), flush=True)
    except BrokenPipeError:  # `| head`: whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
