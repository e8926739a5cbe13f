"""For tests: conformance suite, fault injection, and a launcher that runs SGLang on a machine without a GPU."""
