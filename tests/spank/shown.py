"""Shows the file that a keeper serves at a path: shown.py SOCKET PATH."""

import ctypes
import os
import socket
import sys

MOVE_MOUNT, FROM_AND_TO_DESCRIPTORS = 429, 0x44

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.connect(sys.argv[1])
    line.send(b"mount")
    _, (clone,), _, _ = socket.recv_fds(line, 100, 1)
target = os.open(sys.argv[2], os.O_PATH)
sys.exit(ctypes.CDLL(None).syscall(MOVE_MOUNT, clone, b"", target, b"", FROM_AND_TO_DESCRIPTORS))
