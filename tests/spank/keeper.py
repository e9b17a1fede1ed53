"""A stand-in for an image's keeper: serves one file over FUSE, and hands out mounts of it.

    keeper.py SOCKET IMAGE BYTES MANNER

The file has the inode, size and times of IMAGE and the bytes and mode of BYTES. MANNER: `clones`;
`refuses` all; `silent`; `another` serves a file of another size; `hangs`: whoever opens it waits
until they are killed. Where BYTES is a directory, clones of that are handed out, or not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
import threading

LIBC = ctypes.CDLL(None, use_errno=True)
RDONLY_NOSUID_NODEV, CLONE_NEWNS, PRIVATE, BIND = 7, 0x20000, 1 << 18 | 1 << 14, 4096
OPEN_TREE, OPEN_TREE_CLONE = 428, 1 | os.O_CLOEXEC
INIT, GETATTR, OPEN, READ, STATFS, RELEASE = 26, 3, 14, 15, 17, 18
NO_ANSWER = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
INTERRUPT = 36


class File:
    def __init__(self, image: str, data: str, manner: str) -> None:
        st, mode = os.stat(image), os.stat(data).st_mode
        with open(data, "rb") as file:
            self.data = file.read() + b"grown" * (manner == "another")
        self.hangs = manner == "hangs"
        times = [divmod(ns, 10**9) for ns in (st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns)]
        head = [st.st_ino, len(self.data), 1, *(seconds for seconds, _ in times)]
        tail = [*(ns for _, ns in times), mode, 1, st.st_uid, st.st_gid, 0, 4096, 0]
        self.attributes = struct.pack("<QII6Q10I", 3600, 0, 0, *head, *tail)
        self.options = f"rootmode={mode:o},user_id=0,group_id=0,allow_other,default_permissions"

    def serve(self, fuse: int) -> None:
        while True:
            try:
                packet = os.read(fuse, 1 << 18)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN, errno.EPERM):
                    continue
                return
            _, call, unique = struct.unpack_from("<IIQ", packet)
            if call == INTERRUPT:
                (waits,) = struct.unpack_from("<Q", packet, 40)
                os.write(fuse, struct.pack("<IiQ", 16, -errno.EINTR, waits))
            if call not in NO_ANSWER and not (call == OPEN and self.hangs):
                number, answer = self.answer(call, packet)
                os.write(fuse, struct.pack("<IiQ", 16 + len(answer), -number, unique) + answer)

    def answer(self, call: int, packet: bytes) -> tuple[int, bytes]:
        if call == INIT:
            return 0, struct.pack("<IIIIHHIIHHII6I", 7, 31, 1 << 17, 1, 12, 9, 4096, 1, *[0] * 10)
        if call == GETATTR:
            return 0, self.attributes
        if call == READ:
            _, offset, size = struct.unpack_from("<QQI", packet, 40)
            return 0, self.data[offset : offset + size]
        fixed = {OPEN: bytes(16), STATFS: bytes(80), RELEASE: b""}
        return (0, fixed[call]) if call in fixed else (errno.ENOSYS, b"")


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def mounted(file: File | None, place: bytes) -> None:
    """In a namespace that nobody else sees."""
    checked(LIBC.unshare(CLONE_NEWNS))
    checked(LIBC.mount(b"none", b"/", None, PRIVATE, None))
    if file is None:
        checked(LIBC.mount(place, place, None, BIND, None))
        return
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse},{file.options}".encode()
    checked(LIBC.mount(b"forestage", place, b"fuse.forestage", RDONLY_NOSUID_NODEV, options))
    threading.Thread(target=file.serve, args=(fuse,), daemon=True).start()


def talk(line: socket.socket, place: bytes, manner: str) -> None:
    while True:
        request = line.recv(100)
        if not request:
            return
        if manner == "silent":
            continue
        if request == b"mount" and manner in ("clones", "another", "hangs"):
            clone = checked(LIBC.syscall(OPEN_TREE, -100, place, OPEN_TREE_CLONE))
            socket.send_fds(line, [b"ok"], [clone])
            os.close(clone)
        else:
            line.send(b"no as the test wants it")


def main() -> None:
    name, image, data, manner = sys.argv[1:]
    file = None if os.path.isdir(data) else File(image, data, manner)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        mounted(file, data.encode())
        print("ready", flush=True)
        while True:
            args = (listener.accept()[0], data.encode(), manner)
            threading.Thread(target=talk, args=args, daemon=True).start()


if __name__ == "__main__":
    main()
