"""The public functions and classes of `import shardvit`, as docs/api.md describes them."""
