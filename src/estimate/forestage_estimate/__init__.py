"""What staging would have saved a cluster, from Slurm's accounting, before anything is installed.

One file for any node or login node: standard library only, Python 3.9, no root, writes nothing.

    accounting   rows of sacct: which job started where, with which images. Trusts no row
    replay       an LRU cache on each node, fed with these starts
    figures      what came of it, each figure with the share of starts that it knows
    text, page   the figures for people
    command      the options
"""
