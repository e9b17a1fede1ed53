"""Images that are copied before the jobs begin which wait for a node.

    slurm_queries    what one host asks Slurm
    queue_lines      what Slurm's queue names
    policy           what of it a node copies, and what stays for it
    expected_list    the list that this host makes of the queue, and all nodes ask for
    prefetch_record  what a node has looked at for it

`features/prefetch/prefetch_host` and `features/prefetch/prefetch_node` act on it, by a timer. No
hook loads any of it.
"""
