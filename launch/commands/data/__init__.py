"""Commands that make, show and check shards."""
