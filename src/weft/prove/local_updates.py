"""Proof of local updates: the layout inside a site like any layout, the outer steps against sites simulated on one device.

A mesh with an axis of local updates does not compute what one device computes, by design. So two
things are compared: the layout without that axis, on the batch of one site, with one device; and in
float64 the outer parameters and those of every site, after a few outer steps and a resume, with
the algorithm on one device: plain models, one for each site, trained one after the other.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.folder import checkpoints
from weft.checkpoint.read import open_checkpoint
from weft.comm.comm import Comm
from weft.config.schema import SiteConfig
from weft.core.axes import Box, local_update_axis, without_local_updates
from weft.core.mesh import Mesh
from weft.models.common.batch import Batch
from weft.prove.bounds import TOLERANCE
from weft.prove.raw_batch import samples_of_step, with_draw_keys
from weft.prove.reference import Reference, StepGradients
from weft.prove.report import Difference, Pass, PhaseBound
from weft.prove.subject import Subject, Task, shortened
from weft.run.run_ranks import run_ranks
from weft.train.event_log import EventLog
from weft.train.loop import run_training

EVERY, STEPS, STEPS_BEFORE_RESUME = 2, 5, 3
"""Inner steps between outer ones; all steps; those before the resume, which is inside a period."""
TIMEOUT_S = 3600.0
MOST = 127.0
ROUNDING_OF_ZERO = 1e-10
"""Share of the largest gradient: smaller ones are zero in exact arithmetic, as that of the key bias of
softmax attention. Adaptive optimizers make updates of full size of them, whose signs rounding draws.
"""

Tensors = dict[str, Tensor]


def sites_note(mesh: Mesh) -> str:
    """What was compared, for the report."""
    inner = str(without_local_updates(mesh))
    return (
        f"sites train apart: compared are the layout inside a site ({inner}) with one device,"
        f" and {STEPS} steps of all sites, joined every {EVERY}, with local updates on one device"
    )


@dataclass(frozen=True)
class SiteProof:
    """The comparison of outer steps.

    Attributes:
        subject: the run over sites, with the sizes that are compared.
    """

    subject: Subject

    @staticmethod
    def of(subject: Subject) -> SiteProof:
        """The proof of a run, in float64 and with short periods."""
        values: dict[str, Any] = {
            "site.every": EVERY,
            "site.overlap": min(subject.site.overlap, EVERY - 1),
            "steps": max(subject.schedule_steps, STEPS),
            "resume": None,
        }
        if "balance_rate" in subject.model.architecture:
            values["model.balance_rate"] = 0.0  # proved inside the site
        in_float64 = subject.in_float64()
        return SiteProof(replace(in_float64.with_values(values), first_unclipped=None))

    @property
    def num_sites(self) -> int:
        """Number of sites."""
        mesh = self.subject.mesh
        return mesh.degree(local_update_axis(mesh) or ())

    def compare(self) -> Pass:
        """Train on the layout and on one device, and compare all parameters."""
        found = self._train_layout()
        expected = self._train_plain()
        differences: list[Difference] = []
        largest = 0.0
        for name, right in expected.items():
            measured = _relative_difference(found.get(name), right)
            largest = max(largest, measured)
            if measured > TOLERANCE:
                differences.append(self._difference(name, measured))
        bound = PhaseBound("update", len(expected), largest, TOLERANCE, largest / TOLERANCE)
        return Pass("float64, local updates", f"{TOLERANCE:.0e}", (bound,), tuple(differences))

    def _difference(self, name: str, measured: float) -> Difference:
        parameter = name.rpartition("/")[2]
        mesh = self.subject.mesh
        return Difference(
            tensor=name,
            block=parameter.partition(".")[0],
            parameter=parameter,
            phase="update",
            step=STEPS,
            micro_batch=None,
            axis=local_update_axis(mesh) or "",
            ranks=tuple(range(mesh.size)),
            collective="",
            relation="not what local updates on one device give",
            measured=measured,
            bound=TOLERANCE,
        )

    # on the layout

    def _train_layout(self) -> Tensors:
        """Parameters by section and name, from the last checkpoint of the layout's run."""
        with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
            out = Path(folder) / "run"

            def rank(comm: Comm) -> None:
                self._train_rank(comm, out, resume=None, total=STEPS_BEFORE_RESUME)
                self._train_rank(comm, out, resume="auto", total=STEPS)

            run_ranks(self.subject.mesh, rank, timeout_s=TIMEOUT_S, takes_turns=True)
            _, path = next(iter(checkpoints(out)))
            return self._stored(path)

    def _train_rank(self, comm: Comm, out: Path, *, resume: str | None, total: int) -> None:
        training = self.subject.build_training(comm, out=str(out), resume=resume)
        training = shortened(training, total=total, saves=True)
        run_training(training, EventLog(None, []))

    def _stored(self, path: Path) -> Tensors:
        """The outer parameters, their momentum, and the parameters of every site, as a checkpoint
        has them.
        """
        checkpoint = open_checkpoint(path)
        sections = ["model", self._momentum_section]
        sections.extend(self._section_of_site(index) for index in range(self.num_sites))
        found = {}
        for section in sections:
            source = checkpoint.section(section)
            for name, shape in source.shapes.items():
                everything = Box.whole(tuple(shape))
                found[f"{section}/{name}"] = source.read(name, everything)
        return found

    @property
    def _momentum_section(self) -> str:
        return f"{local_update_axis(self.subject.mesh)}/momentum"

    def _section_of_site(self, index: int) -> str:
        axis = local_update_axis(self.subject.mesh)
        return f"{axis}/{index}/model"

    # on one device

    def _train_plain(self) -> Tensors:
        sites = [self._plain_site(index) for index in range(self.num_sites)]
        plain = PlainOuterStep(self.subject.site, sites)
        training = [site.steps(STEPS) for site in sites]
        for number, *_ in zip(*training, strict=True):
            plain.after_step(number)
        found = {}
        compared = _with_gradients(sites)
        for name in compared:
            found[f"model/{name}"] = plain.outer[name]
            found[f"{self._momentum_section}/{name}"] = plain.momentum[name]
        for index, site in enumerate(sites):
            section = self._section_of_site(index)
            for name in compared:
                found[f"{section}/{name}"] = site.trained[name]
        return found

    def _plain_site(self, index: int) -> PlainSite:
        task = self.subject.inside_site().task()
        return PlainSite(task, index=index, num_sites=self.num_sites)


class PlainSite(Reference):
    """One site on one device: it trains on its part of every batch.

    Args:
        task: of one site.

    Attributes:
        largest_gradients: largest magnitude in the gradient of each parameter, over all steps.
    """

    def __init__(self, task: Task, *, index: int, num_sites: int) -> None:
        super().__init__(task, records=False)
        self.index = index
        self.num_sites = num_sites
        self.largest_gradients: dict[str, float] = dict.fromkeys(self.trained, 0.0)

    def _keep_gradients(self, step: int, computed: StepGradients, num_targets: int) -> None:
        super()._keep_gradients(step, computed, num_targets)
        for name, gradient in computed.gradients.items():
            largest = float(gradient.abs().max()) if gradient.numel() else 0.0
            self.largest_gradients[name] = max(self.largest_gradients[name], largest)

    def batch_of_step(self, step: int) -> Batch:
        """The part of this site: consecutive samples of the batch."""
        task = self.task
        own_size = task.batch.global_size
        global_size = own_size * self.num_sites
        numbers = samples_of_step(task.samples, step - 1, global_size=global_size, seed=task.seed)
        of_sites = numbers.reshape(self.num_sites, -1)
        first = (step - 1) * global_size + self.index * own_size
        places = range(first, first + own_size)
        return with_draw_keys(self.batch_of(of_sites[self.index]), places, seed=task.seed)


def _with_gradients(sites: Sequence[PlainSite]) -> list[str]:
    """The parameters whose gradients are more than the rounding of zeros, on some site."""
    largest = {
        name: max(site.largest_gradients[name] for site in sites) for name in sites[0].trained
    }
    least = ROUNDING_OF_ZERO * max(largest.values(), default=0.0)
    return [name for name, of_parameter in largest.items() if of_parameter > least]


class PlainOuterStep:
    """The outer optimizer over whole tensors of all sites."""

    def __init__(self, settings: SiteConfig, sites: list[PlainSite]) -> None:
        self.settings = settings
        self.sites = sites
        self.outer: Tensors = {}
        self.momentum: Tensors = {}
        for name, value in sites[0].trained.items():
            self.outer[name] = value.clone()
            self.momentum[name] = torch.zeros_like(value)
        self.exchanged: Tensors = {}

    def after_step(self, number: int) -> None:
        """Exchange and apply outer gradients where step `number` does."""
        place = number % self.settings.every
        if place == 0:
            self.exchanged = {name: self._mean_gradient(name) for name in self.outer}
        if place == self.settings.overlap and self.exchanged:
            self._apply(self.exchanged)
            self.exchanged = {}

    def _mean_gradient(self, name: str) -> Tensor:
        on_wire = WIRES[self.settings.wire]
        gradients = []
        for site in self.sites:
            gradient = self.outer[name] - site.trained[name]
            gradients.append(on_wire(gradient))
        return torch.stack(gradients).mean(0)

    def _apply(self, gradients: Mapping[str, Tensor]) -> None:
        settings = self.settings
        kept = settings.mix if settings.overlap else 0.0
        for name, gradient in gradients.items():
            outer = self.outer[name]
            velocity = settings.momentum * self.momentum[name] + gradient
            self.momentum[name] = velocity
            change = gradient + settings.momentum * velocity
            outer -= settings.lr * change
            for site in self.sites:
                value = site.trained[name]
                value.copy_(kept * value + (1 - kept) * outer)
                site.params[name].data.copy_(value)


def _int8(x: Tensor) -> Tensor:
    """One scale for each row of the last dim."""
    rows = x.reshape(-1, x.shape[-1])
    largest = rows.abs().amax(1, keepdim=True)
    scales = (largest / MOST).float().to(x.dtype)  # they are sent in float32
    is_zero = scales == 0
    steps = (rows / scales).masked_fill(is_zero, 0.0)
    rounded = steps.round().clamp(-MOST, MOST)
    return (rounded * scales).view(x.shape)


WIRES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda x: x.to(torch.float32).to(x.dtype),
    "bfloat16": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "int8": _int8,
}


def _relative_difference(found: Tensor | None, right: Tensor) -> float:
    if found is None or found.shape != right.shape:
        return math.inf
    difference = (found - right).abs().max()
    smallest_divisor = torch.finfo(right.dtype).tiny
    largest = right.abs().max().clamp(min=smallest_divisor)
    ratio = float(difference / largest)
    if math.isnan(ratio):
        return math.inf
    return ratio
