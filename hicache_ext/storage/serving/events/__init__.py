"""What changes in the tiers, told to routers: compared (changes.py), numbered and sent (publisher.py)."""
