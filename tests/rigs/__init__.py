"""What tests, campaigns and benchmarks of this project need around them: servers, networks, faults. In no wheel."""
