"""In the machine, as root: rounds of a write that began before a copy and lands after it.

    parking.py FARFS WRITTEN COPIED IMAGE ROUNDS

FARFS is the program of tests/faults/farfs.c. WRITTEN and COPIED lead to the same file, which is
IMAGE; by the first it is written, by the second forestage copies it. Prints a line for each round:
what became of the copy, and once the write has landed: how many entries are wrong, what the next
`forestage stage` finds then, whether who reads COPIED without forestage gets the right bytes; and
after a wrong hit what `forestage verify` says, before and after the page cache was dropped.
"""

import contextlib
import glob
import json
import mmap
import os
import subprocess
import sys
import time

FOLDER = "/tmp/parking"
CONTROL, BLOCK = f"{FOLDER}/control", 4096
AT = 10 * BLOCK
ENTRIES = "/mnt/nvme/forestage/entries/*/image"
PATIENCE = 600  # seconds: longer than any wait here


def hang(reads):
    with open(f"{CONTROL}.new", "w") as file:
        file.write("reads -1\n" if reads else "")
    os.rename(f"{CONTROL}.new", CONTROL)


def asked():
    with open(f"{CONTROL}.calls") as file:
        return file.read().splitlines().count("read")


def begin(written):
    """Forks who writes the block of farfs', whose bytes do not come; returns once it waits."""
    before = asked()
    hang(reads=True)
    writer = os.fork()
    if writer == 0:
        block = os.open(f"{FOLDER}/shown/block", os.O_RDONLY)
        mapped = mmap.mmap(block, BLOCK, mmap.MAP_PRIVATE, mmap.PROT_READ)
        try:
            os.pwrite(os.open(written, os.O_RDWR | os.O_DIRECT), mapped, AT)
        finally:
            os._exit(0)
    end = time.monotonic() + PATIENCE
    while asked() == before:
        assert time.monotonic() < end, "the write does not begin"
        time.sleep(0.05)
    return writer


def said(*words):
    """What a command of forestage's prints as JSON, whatever its exit status."""
    argv = ["forestage", *words, "--json"]
    return json.loads(subprocess.run(argv, stdout=subprocess.PIPE, timeout=PATIENCE).stdout)


def a_round(image, written, copied):
    """The image's right bytes have one wrong block until the write lands."""
    subprocess.run(["forestage", "evict", "--all"], stdout=subprocess.DEVNULL, check=True)
    with open(f"{FOLDER}/behind/block", "rb") as file:
        right = file.read()
    with open(written, "r+b") as file:
        file.seek(AT)
        file.write(bytes(BLOCK))
        os.fsync(file.fileno())
    writer = begin(written)
    (copy,) = said("stage", "--user", "alice", copied)["images"]
    hang(reads=False)
    os.waitpid(writer, 0)
    assert block_of(image) == right, "the write has not landed"
    wrong = [file for file in glob.glob(ENTRIES) if block_of(file) != right]
    found = {"copy": outcome(copy), "wrong": len(wrong)}
    if wrong:
        (again,) = said("stage", "--user", "alice", copied)["images"]
        found |= {"next": outcome(again), "plain": block_of(copied) == right}
    if found.get("next") == "hit":
        found["verify"] = verified()
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
        found["dropped"] = verified()
    return found


def block_of(path):
    with open(path, "rb") as file:
        file.seek(AT)
        return file.read(BLOCK)


def outcome(image):
    return image.get("reason") or image["result"]


def verified():
    return [one["result"] for one in said("verify", "--all", "--dry-run")["verdicts"]]


@contextlib.contextmanager
def shown(farfs, data):
    """A file of farfs' that has these bytes: {FOLDER}/shown/block."""
    for folder in ("behind", "shown"):
        os.makedirs(f"{FOLDER}/{folder}")
    for name in (CONTROL, f"{CONTROL}.calls"):
        open(name, "w").close()
    with open(f"{FOLDER}/behind/block", "wb") as block:
        block.write(data)
    point = f"{FOLDER}/shown"
    options = "allow_other,default_permissions"
    server = subprocess.Popen([farfs, f"{FOLDER}/behind", CONTROL, point, options])
    try:
        while not os.path.ismount(point):
            time.sleep(0.05)
        yield
    finally:
        hang(reads=False)
        subprocess.run(["umount", "-l", point])
        server.wait()
        subprocess.run(["rm", "-r", FOLDER])


def main(farfs, written, copied, image, rounds):
    with shown(farfs, block_of(image)):
        for _ in range(int(rounds)):
            print(json.dumps(a_round(image, written, copied)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
