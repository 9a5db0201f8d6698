"""The preprocess pipeline in Apache Beam: elements are files, chunks and tasks, never records.

::

    files -> plan -> chunks -+-> count times -> cut points     (only split.by time)
                             +-> analyse     -> fitted          (only transforms that depend on train)
                             +-> transform   -> reports -> check -> tasks -> write -> manifest

What a step writes has a name that depends on the input alone and appears by a rename, so a runner may run it twice. What comes
out of a step may arrive in any order and is put in input order before it is merged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import apache_beam as beam
import numpy as np

from training.config import Config
from training.config_file import parse_config
from training.data.assembly import (
    ShardTask,
    SlotResult,
    SlotTask,
    build_manifest,
    check_reports,
    count_slot,
    plan_tasks,
    write_final_shard,
)
from training.data.dead_letters import DeadLetter
from training.data.manifest import ShardEntry, SourceEntry
from training.data.pieces import Key, PieceReport, WorkFolder, transform_piece
from training.data.raw import Wanted
from training.data.records import RecordParser, Records
from training.data.sources import Chunk, SourceFile, plan_chunks, read_chunk
from training.data.splits import find_cut_points, fractions_of
from training.data.transforms import Analysis, Fitted, analyse, fit, needs_analysis
from training.errors import SatrapError

_Out = TypeVar("_Out")


@dataclass(frozen=True)
class Job:
    """What every step knows."""

    config_json: str
    folder: WorkFolder
    dead_folder: str
    """Where dead letters will lie if the job is refused for them."""
    sources: tuple[SourceEntry, ...]
    key: str


class _Step(beam.DoFn):  # type: ignore[misc]
    """A DoFn that knows the job and leaves word of the error that ended it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def setup(self) -> None:
        self.config: Config = parse_config(self.job.config_json)
        self.wanted = Wanted.by(self.config)

    def guarded(self, results: Iterable[_Out]) -> Iterator[_Out]:
        """Yield from ``results``. An error is written down first, because runners wrap what is raised."""
        try:
            yield from results
        except (SatrapError, OSError) as error:
            path = self.job.folder.failure()
            partial = path.with_name(f"failure-{os.getpid()}.partial")
            partial.write_text(json.dumps({"kind": type(error).__name__, "text": str(error)}))
            partial.replace(path)
            raise

    def pieces(self, chunk: Chunk, parser: RecordParser) -> Iterator[tuple[Key, Records, list[DeadLetter], frozenset[str]]]:
        """Read and parse a chunk."""
        for raw in read_chunk(chunk, self.config.data, self.wanted):
            records, letters = parser.parse(raw, chunk.file.path)
            yield (chunk.file.index, chunk.index, raw.piece), records, letters, raw.present
        with self.job.folder.progress().open("a") as file:
            file.write(f"{chunk.input_bytes}\n")


class PlanChunks(_Step):
    """Cuts a file into chunks."""

    def process(self, file: SourceFile) -> Iterator[Chunk]:
        """Runs once per file."""
        yield from self.guarded(plan_chunks(file, self.config.data))


class CountTimes(_Step):
    """Distinct event times of a chunk and their counts."""

    def process(self, chunk: Chunk) -> Iterator[tuple[Any, Any]]:
        """Runs once per chunk."""
        yield from self.guarded(self._count(chunk))

    def _count(self, chunk: Chunk) -> Iterator[tuple[Any, Any]]:
        for _, records, _, _ in self.pieces(chunk, RecordParser(self.config, with_ids=False)):
            assert records.time is not None
            yield np.unique(records.time, return_counts=True)


class FindCutPoints(_Step):
    """Where train, valid and test meet in time."""

    def process(self, _: None, times: list[tuple[Any, Any]]) -> Iterator[list[int]]:
        """Runs once."""
        yield from self.guarded(self._find(times))

    def _find(self, times: list[tuple[Any, Any]]) -> Iterator[list[int]]:
        empty = np.empty(0, np.int64)
        distinct, inverse = np.unique(np.concatenate([empty, *(part[0] for part in times)]), return_inverse=True)
        counts = np.zeros(len(distinct), np.int64)
        np.add.at(counts, inverse, np.concatenate([empty, *(part[1] for part in times)]))
        yield find_cut_points(distinct, counts, fractions_of(self.config.split))


class AnalyseTrain(_Step):
    """Statistics of the train records of a chunk."""

    def process(self, chunk: Chunk, cut_points: list[int] | None) -> Iterator[Analysis]:
        """Runs once per chunk."""
        yield from self.guarded(self._analyse(chunk, cut_points))

    def _analyse(self, chunk: Chunk, cut_points: list[int] | None) -> Iterator[Analysis]:
        for key, records, _, _ in self.pieces(chunk, RecordParser(self.config, cut_points, with_ids=False)):
            yield analyse(records, key, self.config)


class FitTransforms(_Step):
    """The transforms from all statistics."""

    def process(self, _: None, analyses: list[Analysis], cut_points: list[int] | None) -> Iterator[Fitted]:
        """Runs once."""
        yield from self.guarded(self._fit(analyses, cut_points))

    def _fit(self, analyses: list[Analysis], cut_points: list[int] | None) -> Iterator[Fitted]:
        yield fit(analyses, self.config, cut_points)


class TransformChunk(_Step):
    """Writes the pieces of a chunk."""

    def process(self, chunk: Chunk, fitted: Fitted) -> Iterator[PieceReport]:
        """Runs once per chunk."""
        yield from self.guarded(self._transform(chunk, fitted))

    def _transform(self, chunk: Chunk, fitted: Fitted) -> Iterator[PieceReport]:
        parser = RecordParser(self.config, fitted.cut_points, overflows=fitted.overflows)
        for key, records, letters, present in self.pieces(chunk, parser):
            yield transform_piece(records, letters, key, config=self.config, fitted=fitted, present=present, folder=self.job.folder)


class PlanOutput(_Step):
    """Checks all reports and plans what remains to be written."""

    def process(self, _: None, reports: list[PieceReport]) -> Iterator[ShardTask | SlotTask]:
        """Runs once."""
        yield from self.guarded(self._plan(_ordered(reports)))

    def _plan(self, reports: list[PieceReport]) -> Iterator[ShardTask | SlotTask]:
        check_reports(reports, self.config, self.wanted.columns, self.job.dead_folder)
        yield from plan_tasks(reports, self.config, self.job.folder)


class WriteOutput(_Step):
    """Writes a shard, or counts a slot."""

    def process(self, task: ShardTask | SlotTask, reports: list[PieceReport]) -> Iterator[ShardEntry | SlotResult]:
        """Runs once per task."""
        yield from self.guarded(self._write(task, reports))

    def _write(self, task: ShardTask | SlotTask, reports: list[PieceReport]) -> Iterator[ShardEntry | SlotResult]:
        if isinstance(task, ShardTask):
            yield write_final_shard(task, self.job.folder)
        else:
            yield count_slot(task, _ordered(reports), self.config, self.job.folder)


class WriteManifest(_Step):
    """Writes the manifest, last of all."""

    def process(self, _: None, fitted: Fitted, reports: list[PieceReport], results: list[ShardEntry | SlotResult]) -> Iterator[None]:
        """Runs once; nothing comes after it."""
        yield from self.guarded(self._write(fitted, reports, results))

    def _write(self, fitted: Fitted, reports: list[PieceReport], results: list[ShardEntry | SlotResult]) -> Iterator[None]:
        manifest = build_manifest(self.config, fitted, _ordered(reports), results, sources=list(self.job.sources), key=self.job.key)
        path = self.job.folder.root / "manifest.json"
        partial = path.with_suffix(".partial")
        partial.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        yield from ()


def build_pipeline(pipeline: beam.Pipeline, job: Job, files: list[SourceFile], config: Config) -> None:
    """Add all steps to ``pipeline``."""
    as_list, as_one = beam.pvalue.AsList, beam.pvalue.AsSingleton
    once = pipeline | "once" >> beam.Create([None])
    chunks = pipeline | "files" >> beam.Create(files) | "plan" >> beam.ParDo(PlanChunks(job)) | "spread chunks" >> beam.Reshuffle()
    if config.split.by == "time":
        times = chunks | "count times" >> beam.ParDo(CountTimes(job))
        cuts = once | "find cut points" >> beam.ParDo(FindCutPoints(job), as_list(times))
    else:
        cuts = pipeline | "no cut points" >> beam.Create([None])
    if needs_analysis(config):
        analyses = chunks | "analyse" >> beam.ParDo(AnalyseTrain(job), as_one(cuts))
    else:
        analyses = pipeline | "no analyses" >> beam.Create([])
    fitted = once | "fit" >> beam.ParDo(FitTransforms(job), as_list(analyses), as_one(cuts))
    reports = chunks | "transform" >> beam.ParDo(TransformChunk(job), as_one(fitted))
    tasks = once | "plan output" >> beam.ParDo(PlanOutput(job), as_list(reports)) | "spread tasks" >> beam.Reshuffle()
    results = tasks | "write" >> beam.ParDo(WriteOutput(job), as_list(reports))
    once | "manifest" >> beam.ParDo(WriteManifest(job), as_one(fitted), as_list(reports), as_list(results))


def _ordered(reports: Iterable[PieceReport]) -> list[PieceReport]:
    return sorted(reports, key=lambda report: report.key)
