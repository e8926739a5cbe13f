"""What a page is: identity, envelope, hashes and keys, memory."""
