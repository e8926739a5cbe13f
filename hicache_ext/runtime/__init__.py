"""What every room runs on: threads, locks between processes, files written whole, metrics."""
