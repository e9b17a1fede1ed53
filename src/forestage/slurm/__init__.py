"""What Slurm says: a job's environment, slurm.conf, time limits, the queue."""
