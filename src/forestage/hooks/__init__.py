"""What Slurm runs on a node: Prolog, Epilog, and the companion's step.

Installed hooks say `from forestage.hooks import main`, and outlive the package that installed them
(docs/decisions/0017): that line keeps working.
"""

from forestage.hooks.boundary import main as main
