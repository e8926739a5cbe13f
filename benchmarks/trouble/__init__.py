"""What each open storage backend does to a page in trouble: ``python -m benchmarks.trouble``, docs/trouble.md."""
