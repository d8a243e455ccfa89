"""What each engine can train, shard and read. Pure."""
