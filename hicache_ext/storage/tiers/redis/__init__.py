"""The Redis/Valkey tier: docs/redis.md."""
