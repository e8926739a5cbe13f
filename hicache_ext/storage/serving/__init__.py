"""What a running server needs beside its tiers: its file, its control socket, hints, warming, metrics."""
