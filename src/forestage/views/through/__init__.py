"""The read-through start: a job reads its image while the copy of it is still on its way.

    keeper         a process for each image: holds /dev/fuse and the mount, starts servers, hands
                   out clones of the mount to tasks
    read_server    its child, replaced at once when it dies: answers reads from the copy and the
                   source
    read_policy    which of the two answers a read, and when
    server_memory  what outlives a server: requests that were received and not yet answered

Hooks start keepers. The stager knows nothing of them but cache/arrival_map.py.
"""
