"""The learning rate of rows as a function of the step alone, so that a resumed run goes on with the rate it would have had."""

from __future__ import annotations

import math

from training.config import SparseOptimizerConfig


def rate_at(optimizer: SparseOptimizerConfig, step: int) -> float:
    """Learning rate of the update of ``step`` (the first is 0).

    Warm-up of w steps: (step + 1) / w of ``learning_rate``. Then, with t steps since the last of it (or since step 0):
    constant; inverse_sqrt: sqrt(w / (w + t)), where w counts as 1 if it is 0; cosine: half a wave from 1 at t = 0 to
    ``final_fraction`` at ``decay_steps``, and that from then on.
    """
    schedule, peak = optimizer.schedule, optimizer.learning_rate
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    since = step - warmup + (1 if warmup else 0)
    if schedule.course == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / (max(warmup, 1) + since))
    if schedule.course == "cosine":
        assert schedule.decay_steps is not None
        share = min(1.0, since / schedule.decay_steps)
        return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * 0.5 * (1.0 + math.cos(math.pi * share)))
    return peak
