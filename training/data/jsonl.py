"""Placeholder until the JSON kernel lands."""
from training.data.raw import RawRecords


def parse_jsonl(content, *, piece, first_line, wanted) -> RawRecords: ...
