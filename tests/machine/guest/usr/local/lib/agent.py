"""In the virtual machine: runs scripts that the host sends, each in a thread, and tells their end.

A line of JSON each way, over virtio-serial: {id, script, user, stdin}, {id, code, out, err}.
"""

import json
import os
import subprocess
import threading

PORT = "/dev/virtio-ports/agent"
CLEAN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def serve(port, writing, request):
    user = request["user"]
    argv = ["sh", "-eu", "-c", request["script"]]
    if user != "root":
        argv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *argv]
    home = "/root" if user == "root" else f"/home/{user}"
    env = {**CLEAN, "HOME": home, "USER": user, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        argv, input=request["stdin"].encode(), capture_output=True, env=env, cwd=home
    )
    said = {
        "id": request["id"],
        "code": done.returncode,
        "out": done.stdout.decode(errors="replace"),
        "err": done.stderr.decode(errors="replace"),
    }
    with writing:
        port.write(json.dumps(said).encode() + b"\n")
        port.flush()


def main():
    writing = threading.Lock()
    both = os.open(PORT, os.O_RDWR)  # a port is opened once
    with open(both, "rb") as requests, open(os.dup(both), "wb") as port:
        port.write(b'{"id": 0, "code": 0, "out": "", "err": ""}\n')
        port.flush()
        for line in requests:
            threading.Thread(target=serve, args=(port, writing, json.loads(line))).start()


main()
