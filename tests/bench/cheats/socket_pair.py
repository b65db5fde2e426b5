# refused: Operation not permitted
import socket


def load(event, folder):
    socket.socketpair()
    raise RuntimeError("it was allowed")
