"""The foundation of every room: threads, locks between processes, files written whole, metrics."""
