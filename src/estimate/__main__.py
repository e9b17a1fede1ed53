"""What `python3 forestage-estimate.pyz` and `python3 src/estimate` run."""

from forestage_estimate.estimate_command import run_estimate

run_estimate()
