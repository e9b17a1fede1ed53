"""forestage stages container images on a Slurm job's node before the job starts."""
