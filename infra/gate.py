"""The promotion rule: whether a candidate may become champion, and why or why not, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from training.config import GateConfig, MetricName
from training.evaluation_record import ChampionScore, EvaluationRecord, ModelScore

# Differences of decimal numbers are off by rounding; a limit of -0.001 must accept 0.900 against 0.901.
_ROUNDING = 1e-12
_FLOORS: tuple[MetricName, ...] = ("auc", "calibration")
"""Metrics of which ``min_value`` is the least acceptable value; of the others it is the greatest."""


@dataclass(frozen=True)
class Decision:
    """The gate's verdict."""

    promote: bool
    reason: str
    """In words, with the numbers compared."""


def decide(gate: GateConfig, evaluation: EvaluationRecord) -> Decision:
    """Apply the gate to an evaluation.

    Absolute limits come first: ``min_value`` and ``max_calibration_error`` bind the first version, too. Then the champion, if the
    evaluation has one: the candidate must be better by ``min_improvement`` (in the metric's own direction) on the same test split.
    ``min_value`` is a floor for auc and calibration and a ceiling for the losses; calibrations are compared by their distance from 1.
    """
    problems = _absolute_problems(gate, evaluation.candidate)
    if problems:
        return Decision(False, "; ".join(problems))
    if evaluation.champion is None:
        return Decision(True, f"first version: {_value_text(gate.metric, evaluation.candidate)} on {evaluation.rows} test records")
    return _against(gate, evaluation, evaluation.champion)


def _absolute_problems(gate: GateConfig, candidate: ModelScore) -> list[str]:
    problems = []
    value = candidate.metrics.get(gate.metric)
    if value is None:
        problems.append(f"{gate.metric} of the candidate is undefined: {candidate.undefined.get(gate.metric, 'not measured')}")
    elif gate.min_value is not None and _beyond(gate.metric, value, gate.min_value):
        kind = "below" if gate.metric in _FLOORS else "above"
        problems.append(f"{_value_text(gate.metric, candidate)} is {kind} gate.min_value {gate.min_value:g}")
    if gate.max_calibration_error is not None:
        calibration = candidate.metrics.get("calibration")
        if calibration is None:
            problems.append(f"calibration of the candidate is undefined: {candidate.undefined.get('calibration', 'not measured')}")
        elif abs(calibration - 1) > gate.max_calibration_error + _ROUNDING:
            problems.append(
                f"calibration {calibration:.4f} is off 1 by {abs(calibration - 1):.4f}, above gate.max_calibration_error "
                f"{gate.max_calibration_error:g}"
            )
    return problems


def _against(gate: GateConfig, evaluation: EvaluationRecord, champion: ChampionScore) -> Decision:
    value = evaluation.candidate.metrics[gate.metric]
    theirs = None if champion.score is None else champion.score.metrics.get(gate.metric)
    if champion.score is None or theirs is None:
        why = champion.incomparable or f"its {gate.metric} is undefined"
        promote = gate.if_incomparable == "promote"
        return Decision(promote, f"the champion cannot be compared ({why}) and gate.if_incomparable is {gate.if_incomparable}")
    if value is None:
        raise AssertionError("a candidate without a value fails the absolute limits")
    improvement = _badness(gate.metric, theirs) - _badness(gate.metric, value)
    promote = improvement >= gate.min_improvement - _ROUNDING
    text = (
        f"{_value_text(gate.metric, evaluation.candidate)} against the champion's {theirs:.6g} on the same {evaluation.rows} test records: "
        f"improvement {improvement:+.6f}, {'at least' if promote else 'below'} gate.min_improvement {gate.min_improvement:g}"
    )
    return Decision(promote, text)


def _badness(metric: MetricName, value: float) -> float:
    """Smaller is better, in the metric's own unit."""
    if metric == "auc":
        return -value
    return abs(value - 1) if metric == "calibration" else value


def _beyond(metric: MetricName, value: float, limit: float) -> bool:
    """Whether a value is worse than its absolute limit."""
    return (limit - value if metric in _FLOORS else value - limit) > _ROUNDING


def _value_text(metric: MetricName, score: ModelScore) -> str:
    value = score.metrics[metric]
    return f"{metric} {value:.6g}" + (f" (off 1 by {abs(value - 1):.4g})" if metric == "calibration" and value is not None else "")
