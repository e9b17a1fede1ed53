"""What administrators and timers run on a node, one module for each command or family of them."""
