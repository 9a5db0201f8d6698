"""The learning rate over the steps."""

from __future__ import annotations

import pytest

from training.config import ScheduleConfig, SparseOptimizerConfig
from training.embedding.schedule import rate_at


def rate(step: int, **schedule: object) -> float:
    return rate_at(SparseOptimizerConfig(learning_rate=2.0, schedule=ScheduleConfig(**schedule)), step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, {0: 2.0, 10**9: 2.0}),
        ({"warmup_steps": 4}, {0: 0.5, 1: 1.0, 3: 2.0, 4: 2.0, 1000: 2.0}),
        ({"course": "inverse_sqrt"}, {0: 2.0, 3: 1.0, 99: 0.2}),
        ({"course": "inverse_sqrt", "warmup_steps": 4}, {0: 0.5, 3: 2.0, 15: 1.0, 399: 0.2}),
        ({"course": "cosine", "decay_steps": 10}, {0: 2.0, 5: 1.0, 10: 0.0, 11: 0.0}),
        ({"course": "cosine", "decay_steps": 10, "warmup_steps": 2, "final_fraction": 0.5}, {0: 1.0, 1: 2.0, 6: 1.5, 11: 1.0, 99: 1.0}),
    ],
)
def test_the_rate_of_a_step(schedule: dict[str, object], expected: dict[int, float]) -> None:
    assert {step: pytest.approx(rate(step, **schedule), abs=1e-12) for step in expected} == expected


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ({"course": "cosine"}, "decay_steps: required"),
        ({"decay_steps": 5}, "decay_steps: only meaningful when course is cosine"),
        ({"course": "inverse_sqrt", "final_fraction": 0.1}, "final_fraction: only meaningful"),
        ({"warmup_steps": -1}, "greater than or equal to 0"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(schedule: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ScheduleConfig(**schedule)  # type: ignore[arg-type]
