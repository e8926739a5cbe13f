"""The object tier: pages in S3-compatible stores, Google Cloud Storage, Azure Blob Storage, or a directory."""
