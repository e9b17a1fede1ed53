"""The cache of a node: entries and parts on the NVMe, leases in /run, and who has to go."""
