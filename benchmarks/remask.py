"""Rules of `mrp_remask` at equal tokens per forward (``python -m benchmarks.remask``).

Every rule decodes the same problems at several confidence thresholds tau: a curve of accuracy over tokens per backbone forward.
The first rule's curve is compared with each of the others where both have been measured, at multiples of 0.25 tokens per
forward, by linear interpolation. Intervals are percentiles of a bootstrap over the problems: each resample takes the same
problems for all rules and moves accuracy and speed alike.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mrp_trainer.evaluate import Decoded, decode_problems
from mrp_trainer.intervals import wilson
from mrp_trainer.tasks import SPLITS, problems

from modeling_mrp.generate.option_table import REMASK_RULES

from .common import TINY, emit, header, load

FAMILIES = ("math", "code")
TAUS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SPACING = 0.25
RESAMPLES = 2000


@dataclass
class Curve:
    """What one rule makes of n problems at several thresholds.

    Attributes:
        right: [thresholds, n] 1 where the judge accepts the answer.
        tokens: [thresholds, n] generated tokens.
        forwards: [thresholds, n] backbone forwards.
    """

    right: np.ndarray
    tokens: np.ndarray
    forwards: np.ndarray

    @classmethod
    def of(cls, decoded: Iterable[Decoded]) -> "Curve":
        """From one decoding of the same problems per threshold."""
        parts = [(d.judged, [len(ids) for ids in d.ids], d.row_forwards) for d in decoded]
        return cls(*(np.array(field, float) for field in zip(*parts, strict=True)))

    def points(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens per forward, accuracy in percent), [resamples, thresholds] each; problem i counts weights[:, i] times."""
        speed = (weights @ self.tokens.T) / (weights @ self.forwards.T)
        return speed, 100 * (weights @ self.right.T) / weights.sum(1, keepdims=True)

    def accuracy_at(self, speeds: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """[resamples, speeds] accuracy in percent, between the measured points; that of the nearest one outside them."""
        rows = zip(*self.points(weights), strict=True)
        return np.array([np.interp(speeds, speed[order := speed.argsort()], accuracy[order]) for speed, accuracy in rows])


def compare(one: Curve, other: Curve, resamples: int = RESAMPLES) -> list[dict[str, Any]]:
    """Accuracy of two curves at equal tokens per forward, and the difference `one` - `other` with its 95 % interval.

    The last entry is the mean over the speeds.
    """
    count = one.right.shape[1]
    whole = np.ones((1, count))
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)
    ranges = [curve.points(whole)[0] for curve in (one, other)]
    slowest, fastest = max(speed.min() for speed in ranges), min(speed.max() for speed in ranges)
    speeds = np.arange(np.ceil(slowest / SPACING), np.floor(fastest / SPACING) + 1) * SPACING
    if len(speeds) == 0:
        return []
    ours, theirs = (curve.accuracy_at(speeds, whole)[0] for curve in (one, other))
    differences = one.accuracy_at(speeds, drawn) - other.accuracy_at(speeds, drawn)
    differences = np.concatenate([differences, differences.mean(1, keepdims=True)], 1)
    low, high = np.percentile(differences, (2.5, 97.5), axis=0)
    names: list[float | str] = [*speeds.tolist(), "mean"]
    columns = {
        "accuracy": [*ours, ours.mean()],
        "other_accuracy": [*theirs, theirs.mean()],
        "difference": [*(ours - theirs), (ours - theirs).mean()],
        "low": low,
        "high": high,
    }
    return [
        {"tokens_per_forward": name, **{key: round(float(column[i]), 1) + 0.0 for key, column in columns.items()}}
        for i, name in enumerate(names)
    ]  # + 0.0 makes 0.0 of -0.0


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line per family, rule and tau, then one per comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remask", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rule", nargs="+", choices=REMASK_RULES, default=list(REMASK_RULES), help="the first is compared")
    parser.add_argument("--split", choices=SPLITS, default="heldout")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--tau", nargs="+", type=float, default=list(TAUS))
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count is {options.count}: at least 1 problem")
    model, tokenizer = load(options.model)
    emit(header("remask", options, model))
    for family in options.family:
        asked = problems(family, options.split, options.count)
        decoded: dict[str, list[Decoded]] = {rule: [] for rule in options.rule}
        for rule in options.rule:
            for tau in options.tau:
                of = decode_problems(
                    model,
                    tokenizer,
                    asked,
                    options.batch_size,
                    decoding="mrp_remask",
                    remask_rule=rule,
                    confidence_threshold=tau,
                )
                decoded[rule].append(of)
                assert of.accuracy is not None, "both families have right answers"
                line = {
                    "family": family,
                    "rule": rule,
                    "tau": tau,
                    "accuracy": round(of.accuracy, 1),
                    "accuracy_95": [round(100 * end, 1) for end in wilson(sum(of.judged), len(of.judged)).rounded(5)],
                    "tokens_per_forward": round(of.tokens_per_forward, 3),
                    "head_per_token": round(of.head_forwards_per_token, 3),
                    "revoked": of.forwards["revoked"],
                }
                emit(line)
        curves = {rule: Curve.of(of) for rule, of in decoded.items()}
        first, *others = options.rule
        for other in others:
            for line in compare(curves[first], curves[other]):
                emit({"family": family, "rule": first, "against": other, **line})


if __name__ == "__main__":
    main()
