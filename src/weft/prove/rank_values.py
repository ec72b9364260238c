"""Comparison of what one rank holds with one device: tensors, their number types, restored values, numbers of steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.prove.bounds import largest_difference
from weft.prove.found_differences import FoundDifferences
from weft.prove.localise import Failure, key_of
from weft.prove.record import Observed, RankRecord, Site
from weft.prove.reference_trace import TensorKey
from weft.prove.relations import dtype_text, rounded_to
from weft.prove.report import Phase
from weft.train.loop import Event


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
            whole = self.found.bounds.plain.values.get(key)
            if whole is None:
                self.found.uncompared.add(f"{site.phase} {site.tensor}")
                continue
            expected = observed.place.read(whole)
            if expected is None:
                self.found.uncompared.add(f"{site.phase} {site.tensor}")
                continue
            if site.phase == "checkpoint":
                self._compare_restored(record, site, observed)
            expected = expected.reshape(observed.value.shape)
            self.found.check(site, record.rank, observed, expected, key)

    def _compare_restored(self, record: RankRecord, site: Site, observed: Observed) -> None:
        """What a checkpoint restores is what was saved, to the last bit."""
        phase: Phase = "update" if site.tensor == site.parameter else "moments"
        saved_site = Site(site.step, phase, site.block, site.tensor, site.parameter)
        saved = record.values.get(saved_site)
        if saved is None or torch.equal(saved.value, observed.value):
            return
        difference = largest_difference(observed.value, saved.value)
        scale = self.found.bounds.scale(key_of(site))
        failure = Failure(record.rank, observed, saved.value, difference / scale, 0.0)
        self.found.failures.setdefault(site, {})[record.rank] = failure

    def _compare_types(self, record: RankRecord) -> None:
        """What trained parameters, their gradients and their moments are held in. A coarser type
        than that of the run, or values that were in one, may move no tensor beyond its bound.
        """
        for site, observed in record.values.items():
            right = self._right_dtype(site)
            if right is None or observed.dtype is None or self.found.is_skipped(site):
                continue
            expected = observed.place.read(self.found.bounds.plain.values[key_of(site)])
            if expected is None or expected.numel() != observed.value.numel():
                continue
            text = ""
            if observed.dtype != right:
                text = f"in {dtype_text(observed.dtype)} in place of {dtype_text(right)}"
            elif site.phase == "update":
                coarse = rounded_to(observed.value, expected.reshape(observed.value.shape))
                text = f"rounded to {dtype_text(coarse)}" if coarse is not None else ""
            if text:
                unit = torch.finfo(observed.dtype).eps
                failure = Failure(record.rank, observed, expected, unit, 0.0, text)
                self.found.fail(site, failure)

    def _right_dtype(self, site: Site) -> torch.dtype | None:
        """The number type of a tensor by the config; None: it has none of its own."""
        gradient = TensorKey(site.step, "reduce", f"{site.parameter} gradient")
        if gradient not in self.found.bounds.plain.values:
            return None
        types = self.found.bounds.types
        if site.phase == "reduce":
            return types.reduce
        if site.phase == "clip" or (site.phase == "update" and site.tensor == site.parameter):
            return types.params
        whole = self.found.bounds.plain.values.get(key_of(site))
        if site.phase == "moments" and whole is not None and whole.dim():
            return whole.dtype
        return None

    def _compare_numbers(self, record: RankRecord) -> None:
        for event in record.events:
            if event["event"] == "eval":
                self._compare_evaluation(record, event)
            if event["event"] != "step":
                continue
            step = int(event["step"])
            is_skipped = step in self.found.bounds.plain.skipped
            self.found.number(record, Site(step, "batch", "", "number of targets"), event["tokens"])
            self.found.number(record, Site(step, "loss", "", "loss"), event["loss"])
            self.found.number(record, Site(step, "update", "", "learning rate"), event["lr"])
            if not is_skipped:
                norm = Site(step, "norm", "", "gradient norm")
                self.found.number(record, norm, event["grad_norm"])
                factor = _clip_factor(record, step)
                if factor is not None:
                    self.found.number(record, Site(step, "clip", "", "clip factor"), factor)

    def _compare_evaluation(self, record: RankRecord, event: Event) -> None:
        step = int(event["step"])
        targets = Site(step, "evaluation", "", "number of targets")
        self.found.number(record, targets, event["tokens"])
        self.found.number(record, Site(step, "evaluation", "", "evaluation loss"), event["loss"])


def _clip_factor(record: RankRecord, step: int) -> float | None:
    """Ratio of this rank's clipped gradients to the unclipped ones; None without gradients."""
    product = 0.0
    square = 0.0
    for site, after in record.values.items():
        if site.step != step or site.phase != "clip":
            continue
        title = f"{site.parameter} gradient"
        before_site = Site(step, "reduce", site.block, title, site.parameter)
        before = record.values.get(before_site)
        if before is not None and before.value.shape == after.value.shape:
            product += float((before.value * after.value).sum())
            square += float(before.value.square().sum())
    return product / square if square else None
