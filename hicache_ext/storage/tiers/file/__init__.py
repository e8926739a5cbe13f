"""The file tier: pages on local disks and shared file systems."""
