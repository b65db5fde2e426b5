# harmless: locks on its own files hold up nobody
import fcntl

# honest

held = open("/plugin/plugin.py")
fcntl.flock(held, fcntl.LOCK_EX)
