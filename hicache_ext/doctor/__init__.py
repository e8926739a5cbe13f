"""What ``hicache-ext doctor`` looks at."""
