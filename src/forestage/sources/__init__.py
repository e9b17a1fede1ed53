"""Which bytes a job means, who may read them, and whether they are still the same."""
