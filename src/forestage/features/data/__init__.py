"""Data of jobs: directories, mounted files, and a directory of the job's own."""
