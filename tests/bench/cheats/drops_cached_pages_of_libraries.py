# harmless: pages that another process has mapped stay
import glob
import os

# honest
load_model = load


def load(event, folder):
    for name in glob.glob("/site/**/*.so*", recursive=True) + glob.glob("/usr/lib/*/lib[cm].so*"):
        descriptor = os.open(name, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return load_model(event, folder)
