# harmless: locks on its own files hold up nobody
import fcntl

# honest

file = open("/plugin/plugin.py")
fcntl.flock(file, fcntl.LOCK_EX)
