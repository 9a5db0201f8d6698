"""The dense network and the ranks that train it."""
