# refused: Permission denied|Operation not permitted
import fcntl

# honest
file = open(np.__file__)  # noqa: SIM115
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # whoever opens it has to wait
