"""The tiers. They do not know each other, and nothing above knows their types."""
