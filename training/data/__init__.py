"""From raw events to shards, and from shards to batches."""
