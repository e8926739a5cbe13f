"""Pages: identity, envelope, hashes and keys, memory."""
