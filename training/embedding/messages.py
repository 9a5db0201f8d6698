"""Every message between roles: who sends it, what it carries.

``meta`` is a small JSON object, arrays follow in the order given. N records, U unique signs, T tables, E sum of slot widths.
Ids of a batch travel as ``signs`` uint64 [N, S] of the single-valued slots, then ``offsets`` int64 [N + 1] and ``values`` uint64
per multi-valued slot.
"""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Number of a message kind on the wire."""

    ERROR = 0
    """Any reply instead of its normal one. meta: error."""
    OK = 1
    """A reply without content of its own; meta may carry results."""

    HELLO = 2
    """A client's greeting, before any request. meta: token, session, resume. Reply OK; both may hand over shared memory."""
    GOODBYE = 3
    """A client will not come back; its session may be forgotten. No reply."""

    NEXT_BATCH = 10
    """nn_worker -> data_loader. meta: rank, step. Reply BATCH or END_OF_DATA."""
    BATCH = 11
    """meta: ref, worker, step, rows, global_rows. arrays: dense float32 [N, D], label float32 [N]."""
    END_OF_DATA = 12
    """No step of that number: the run is over."""

    PUT_IDS = 20
    """data_loader -> embedding_worker. meta: ref, rank, step. arrays: the ids. The worker keeps them until their update."""
    LOOK_UP = 21
    """nn_worker -> embedding_worker. meta: ref. Reply EMBEDDINGS; the batch stays held for its update."""
    LOOK_UP_IDS = 22
    """nn_worker -> embedding_worker, evaluation: arrays: the ids. Inserts nothing, holds nothing. Reply EMBEDDINGS."""
    EMBEDDINGS = 23
    """meta: scale, unique_ratio. arrays: pooled rows [N, E] float16 or float32, divided by scale on receipt."""
    UPDATE = 24
    """nn_worker -> embedding_worker. meta: ref, scale, skip. arrays: gradients [N, E] (none if skip). Reply OK once every server has it."""

    ROWS_OF = 30
    """embedding_worker -> parameter_server. meta: insert, step (-1: evaluation). arrays: signs uint64 [U] per table. Reply ROWS."""
    ROWS = 31
    """meta: scales [T], places. arrays: rows [U, dim] per table. ``places`` is the number under which the server remembers for a while
    where it found the signs, or None."""
    APPLY = 32
    """embedding_worker -> parameter_server. meta: step, rank, scales [T], places (of the look-up of the same signs). arrays: signs [U],
    gradients [U, dim] per table. Reply OK: applied."""
    SNAPSHOT = 33
    """nn_worker rank 0 -> parameter_server. meta: directory. Reply OK with the metas of the tables."""
    RESTORE = 34
    """nn_worker rank 0 -> parameter_server. meta: parts [{directory, server, num_servers, tables}], rows_only. Reply OK: rows."""
    STATISTICS = 35
    """nn_worker rank 0 -> parameter_server, embedding_worker. Reply OK with phases {name: [calls, seconds]} since the last, and a
    server's counters per table."""
    SAMPLE = 36
    """nn_worker rank 0 -> parameter_server. meta: table, count. Reply OK; arrays: signs [C], values [C, dim]."""
    THREADS = 37
    """nn_worker rank 0 -> parameter_server. meta: threads that share one large look-up or update from now on. Reply OK."""
