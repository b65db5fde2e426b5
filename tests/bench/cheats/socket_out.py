# refused: Operation not permitted
import socket


def load(event, folder):
    socket.create_connection(('127.0.0.1', 80))
    raise RuntimeError("it was allowed")
