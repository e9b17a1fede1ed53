"""Run on a node as some user: opens whatever that user can reach or guess there.

Until its stdin ends it looks again and again, so that it also meets what is there for a moment
only. Then it prints the names under which it could read a squashfs image, as JSON.
"""

import contextlib
import json
import os
import select
import sys
from collections.abc import Iterator

PLACES = ("/mnt/nvme", "/run", "/var/log/forestage", "/var/lib/forestage", "/shared/alice")


def names() -> Iterator[str]:
    for place in PLACES:
        for directory, _, files in os.walk(place):
            yield from (f"{directory}/{file}" for file in files)
    # The kernel shows everybody which file of which disk lies over which path.
    with open("/proc/self/mountinfo") as table:
        for line in table:
            root, point = line.split()[3:5]
            if root.startswith("/forestage/"):
                yield from (point, f"/mnt/nvme{root}")
    for process in filter(str.isdigit, os.listdir("/proc")):
        for fd in range(12):
            yield f"/proc/{process}/fd/{fd}"
        for way in ("root/mnt/nvme/forestage", "cwd"):
            for directory, _, files in os.walk(f"/proc/{process}/{way}"):
                yield from (f"{directory}/{file}" for file in files)
                break


def readable_image(name: str) -> bool:
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.pread(fd, 4, 0) == b"hsqs"
        finally:
            os.close(fd)
    return False


found: set[str] = set()
first = True
while first or not select.select([sys.stdin], [], [], 0)[0]:
    found.update(filter(readable_image, names()))
    if first:
        print("looking", flush=True)
    first = False
print(json.dumps(sorted(found)))
