"""Why a job's data is not shown; events/reasons.py has what these are."""

FAILURES = frozenset(("job-dir",))

REASONS = {
    "no-companion": "Data shows in steps only through forestage's SPANK plugin, which this node's"
    " plugstack.conf does not load.",
    "not-a-directory": "The hint ends with a slash, as a directory's does; this is none.",
    "odd-file": "The directory holds something that is neither a file, a directory nor a link, or"
    " another file system; it is staged whole or not at all.",
    "too-many-files": "The directory has more files than the admin's `data: max_files:`, or than a"
    " step can look at in the time that it has.",
    "bad-look": "Another node of the job reported impossible contents of the directory.",
    "no-erofs": "The node's kernel lacks the file system of which copies of directories are made.",
    "job-dir": "The job has no directory of its own on this node.",
    "job-dir-full": "It did not fit into the job's own directory.",
    "not-put": "It could not be put into the job's own directory.",
}
