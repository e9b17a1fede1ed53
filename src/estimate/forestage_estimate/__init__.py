"""What staging would have saved a cluster, from Slurm's accounting, before anything is installed.

One file for any node or login node: standard library only, Python 3.9, no root, writes nothing.

    accounting                 rows of sacct: which job started where, with which images
    cache_replay               an LRU cache on each node, fed with these starts
    savings                    the figures, each with the share of starts that it knows
    text_report, html_report   the figures for people
    estimate_command           the options
"""
