"""What the NVMe holds: entries, parts, leases, redirects, and who has to go."""
