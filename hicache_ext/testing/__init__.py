"""For tests: conformance suites, and a launcher that runs SGLang on a machine without a GPU."""
