"""Embedding tables, the processes that hold and feed them, and the wire between."""
