"""What the queue tells: which images nodes copy before a job starts."""
