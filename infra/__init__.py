"""Machines, storage and the model registry."""
