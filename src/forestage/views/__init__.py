"""What a job's steps see: a copy that is still being made, a directory, a mounted file, the job's
own directory.

Nothing of it waits in a Prolog, nothing shows outside of the job's steps: the companion mounts it
in each task's own mount namespace. Redirects of the whole node are in bind/.
"""
