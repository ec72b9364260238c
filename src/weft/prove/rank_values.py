"""Comparison of what one rank holds with one device: tensors, their number types, restored values, numbers of steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.prove.found_differences import FoundDifferences
from weft.prove.localise import Failure, key_of
from weft.prove.record import Observed, RankRecord, Site
from weft.prove.reference_trace import TensorKey
from weft.prove.relations import dtype_text, rounded_to
from weft.prove.report import Phase
from weft.train.training import Event


@dataclass(frozen=True)
class RankValues:
    """Compares the records of single ranks.

    Args:
        found: where differences are added.
    """

    found: FoundDifferences

    def compare(self, record: RankRecord) -> None:
        """Compare all that a rank has recorded."""
        self._compare_values(record)
        self._compare_types(record)
        self._compare_numbers(record)

    def _compare_values(self, record: RankRecord) -> None:
        for site, observed in record.values.items():
            if self.found.is_skipped(site):
                continue
            key = key_of(site)
            whole = self.found.reference.get(key)
            expected = None if whole is None else observed.place.read(whole)
            if expected is None:
                self.found.uncompared.add(f"{site.phase} {site.tensor}")
                continue
            if site.phase == "checkpoint":
                self._compare_restored(record, site, observed)
            expected = expected.reshape(observed.value.shape)
            self.found.check(site, record.rank, observed, expected, key)

    def _compare_restored(self, record: RankRecord, site: Site, observed: Observed) -> None:
        """What a checkpoint restores is what was saved, to the last bit."""
        phase: Phase = "moments"
        if site.tensor == site.parameter:
            phase = "update"
        saved = record.values.get(replace(site, phase=phase))
        if saved is None or torch.equal(saved.value, observed.value):
            return
        key = key_of(site)
        relative = self.found.bounds.relative(observed.value, saved.value, key)
        failure = Failure(record.rank, observed, expected=saved.value, measured=relative, bound=0.0)
        at_site = self.found.failures.setdefault(site, {})
        at_site[record.rank] = failure

    def _compare_types(self, record: RankRecord) -> None:
        """What trained parameters, their gradients and their moments are held in. A coarser type
        than that of the run, or values that were in one, may move no tensor beyond its bound.
        """
        for site, observed in record.values.items():
            right = self._right_dtype(site)
            dtype = observed.dtype
            if right is None or dtype is None or self.found.is_skipped(site):
                continue
            whole = self.found.reference[key_of(site)]
            expected = observed.place.read(whole)
            if expected is None or expected.numel() != observed.value.numel():
                continue
            text = ""
            if dtype != right:
                text = f"in {dtype_text(dtype)} in place of {dtype_text(right)}"
            elif site.phase == "update":
                text = _rounding_text(observed.value, expected)
            if not text:
                continue
            failure = Failure(
                record.rank,
                observed,
                expected,
                measured=torch.finfo(dtype).eps,
                bound=0.0,
                text=text,
            )
            self.found.fail(site, failure)

    def _right_dtype(self, site: Site) -> torch.dtype | None:
        """The number type of a tensor by the config; None: it has none of its own."""
        gradient = TensorKey.of_gradient(site.step, "reduce", site.parameter)
        if gradient not in self.found.reference:
            return None
        types = self.found.bounds.types
        if site.phase == "reduce":
            return types.reduce
        if site.phase == "clip":
            return types.params
        whole = self.found.reference.get(key_of(site))
        if site.phase == "update" and site.tensor == site.parameter:
            return None if whole is None else whole.dtype
        if site.phase == "moments" and whole is not None and whole.dim():
            return whole.dtype
        return None

    def _compare_numbers(self, record: RankRecord) -> None:
        for event in record.events:
            if event["event"] == "eval":
                self._compare_evaluation(record, event)
            elif event["event"] == "step":
                self._compare_step(record, event)
        for step, rate in record.rates.items():
            self.found.number(record, Site.of_number(step, "update", "learning rate"), rate)

    def _compare_step(self, record: RankRecord, event: Event) -> None:
        step = int(event["step"])
        numbers = {
            Site.of_number(step, "batch", "number of targets"): event["tokens"],
            Site.of_number(step, "loss", "loss"): event["loss"],
            Site.of_number(step, "update", "learning rate"): event["lr"],
        }
        if step not in self.found.bounds.plain.skipped:
            norm = Site.of_number(step, "norm", "gradient norm")
            numbers[norm] = event["grad_norm"]
            factor = _clip_factor(record, step)
            if factor is not None:
                clipping = Site.of_number(step, "clip", "clip factor")
                numbers[clipping] = factor
        for site, value in numbers.items():
            self.found.number(record, site, value)

    def _compare_evaluation(self, record: RankRecord, event: Event) -> None:
        step = int(event["step"])
        num_targets = Site.of_number(step, "evaluation", "number of targets")
        self.found.number(record, num_targets, event["tokens"])
        loss = Site.of_number(step, "evaluation", "evaluation loss")
        self.found.number(record, loss, event["loss"])


def _clip_factor(record: RankRecord, step: int) -> float | None:
    """Ratio of this rank's clipped gradients to the unclipped ones; None without gradients."""
    product = 0.0
    square = 0.0
    for site, after in record.values.items():
        if site.step != step or site.phase != "clip":
            continue
        unclipped = replace(site, phase="reduce", tensor=f"{site.parameter} gradient")
        before = record.values.get(unclipped)
        if before is None or before.value.shape != after.value.shape:
            continue
        product += float((before.value * after.value).sum())
        square += float(before.value.square().sum())
    return product / square if square else None


def _rounding_text(measured: Tensor, expected: Tensor) -> str:
    """The coarser number type of which all values are; "": there is none."""
    coarse = rounded_to(measured, expected.reshape(measured.shape))
    return "" if coarse is None else f"rounded to {dtype_text(coarse)}"
