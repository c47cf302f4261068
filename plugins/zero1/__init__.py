"""The sharded update: owners hold optimizer state, update their shards, and spread parameters."""
