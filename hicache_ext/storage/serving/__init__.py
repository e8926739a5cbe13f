"""What a running server needs besides its tiers: its file, its control socket, hints, warming, metrics."""
