"""The pipeline as a DAG, and the command line."""
