"""What a job's comment names besides images: directories, mounted files, the job's own disk.

Nothing of it waits in a Prolog, nothing shows outside of the job's steps: the companion mounts it
in each task's own mount namespace.
"""
