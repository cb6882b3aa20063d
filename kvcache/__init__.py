"""Memory: block pool, block tables, prefix cache, KV storage planes."""
