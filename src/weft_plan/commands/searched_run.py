"""The run whose layouts `weft plan` searches: its devices, its candidates, layouts by name, and the run with a layout."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config import flags, toml
from weft.config.base_files import read_with_bases
from weft.config.changed_runs import changes
from weft.config.families import DEFAULT_PRESET
from weft.config.hardware import Hardware
from weft.config.layout_keys import LayoutKeys
from weft.config.load import AUTO_MESH
from weft.config.rules.checks import as_flags, run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.rules.sections import bandwidths_are_known
from weft.config.run import Run, hardware_of, recompute_of
from weft.config.schema import ModelSection, SiteConfig
from weft.core.dimension import local_update_axes
from weft.core.mesh import Mesh
from weft.errors import ConfigError, Fault, UserError
from weft.layout.recomputation import KEY as RECOMPUTE
from weft.layout.recomputation import is_chosen_by_memory
from weft.start.auto_mesh import ChosenMesh
from weft.start.checked_run import load_checked_run
from weft_plan.search.candidates import RECOMPUTES, Candidates, Space, candidates, nearest_devices
from weft_plan.search.layout_choice import SEARCHED, Layout, read_layout

if TYPE_CHECKING:
    from weft_plan.search.layout_costs import LayoutCosts

ALWAYS_NAMED = frozenset({"mesh", "batch.micro_size", "parallel.zero"})
"""Keys that the command of a layout names in any case."""


def one_rank(run: Run, *, is_flag: bool) -> ChosenMesh:
    """No mesh, for `weft plan`, which searches one itself.

    Raises:
        ConfigError: --mesh auto is given.
    """
    if is_flag:
        what = "auto is what `weft plan` looks for"
        raise ConfigError(Fault("mesh", what, AUTO_MESH, fix="leave --mesh out"))
    return ChosenMesh("", "")


@dataclass(frozen=True)
class SearchedRun:
    """A run whose layout is searched.

    Attributes:
        words: of the command line, without those of `weft plan`.
        pinned: keys of the search that are given, and stay as they are.
        num_devices: that a layout fills.
    """

    run: Run
    words: tuple[str, ...]
    pinned: frozenset[str]
    hardware: Hardware
    num_devices: int

    @staticmethod
    def read(words: Sequence[str], devices: int | None) -> SearchedRun:
        """The run of these words on a number of devices; None: on those of its mesh.

        Raises:
            UserError: with every fault of the run; or its devices are not known, or contradictory.
        """
        pinned = _pinned_keys(words)

        def adapt(run: Run) -> Run:
            if "batch.micro_size" in pinned:
                return run
            smallest = run.batch.statistics_size or 1  # 1 divides any batch
            return run.with_values({"batch.micro_size": smallest})

        run = load_checked_run(words, adapt=adapt, choose_mesh=one_rank)
        if is_chosen_by_memory(run.parallel.recompute):
            run = run.with_values({RECOMPUTE: "none"})
            pinned -= {RECOMPUTE}
        if recompute_of(run).uniform not in RECOMPUTES:
            what = "the search gives all layers of a layout the same recomputation"
            got = run.parallel.recompute
            raise ConfigError(Fault(RECOMPUTE, what, got=got, need=", ".join(RECOMPUTES)))
        hardware = hardware_of(run)
        if hardware is None:
            need = "a name or a hardware file"
            fix = "--hardware h100"
            raise ConfigError(Fault("hardware", "no device is named", need=need, fix=fix))
        if _is_sites_alone(run.device_mesh, devices):
            pinned -= {"mesh"}
        num_devices = _num_devices(devices, run.device_mesh.size, pinned)
        faults = tuple(bandwidths_are_known(hardware, num_devices))
        if faults:
            raise ConfigError(*faults)
        return SearchedRun(run, tuple(words), pinned, hardware, num_devices)

    @property
    def keys(self) -> LayoutKeys:
        """The keys of its layout."""
        return LayoutKeys.of(self.run)

    @property
    def model(self) -> ModelSection:
        """The model section of the config."""
        return self.run.model

    @property
    def site(self) -> SiteConfig:
        """The config of local updates."""
        return self.run.site

    @property
    def compute_dtype(self) -> str:
        """The type in which layers compute: "bfloat16"."""
        return self.run.precision.compute

    def candidates(self) -> Candidates:
        """The legal layouts.

        Raises:
            ConfigError: there is none.
        """
        space = Space(self.num_devices, self.hardware.node, self.pinned)
        if "mesh" not in self.pinned:
            space = replace(space, sites=_sites(self.run.device_mesh))
        found = candidates(self.keys, space)
        if not found.groups:
            raise ConfigError(self._no_layout(space, found))
        return found

    def _no_layout(self, space: Space, found: Candidates) -> Fault:
        """Why no layout fills the devices, and the nearest numbers that one fills."""
        reasons = [reason for reason, _ in found.illegal.most_common(2)]
        near = nearest_devices(self.keys, space)
        fixes = [f"--devices {number}" for number in near]
        if self.run.model.preset == DEFAULT_PRESET:
            fixes.insert(0, "name the model that is planned: --model.preset llama3-8b")
        fix = ", or ".join(fixes)
        return Fault(
            "devices", f"no layout fills {space.num_devices}", got="; ".join(reasons), fix=fix
        )

    def scale_faults(self, sizes: Collection[int]) -> Iterator[Fault]:
        """Numbers of devices for `scale` that no layout fills."""
        for size in sizes:
            yield from bandwidths_are_known(self.hardware, size)
            space = Space(size, self.hardware.node, self.pinned - {"mesh"})
            found = candidates(self.keys, space)
            if not found.groups:
                fault = self._no_layout(space, found)
                fix = fault.fix.replace("--devices", "--scale")
                yield replace(fault, key="scale", fix=fix)

    def named_layout(self, text: str) -> Layout:
        """The layout that `--why` names.

        Raises:
            ConfigError: it is not legal, has another number of devices, or a word is no part of it.
        """
        try:
            layout = read_layout(text, self.keys)
        except UserError as error:
            raise ConfigError(*_faults_of_why(error.faults, text)) from None
        size = Mesh.parse(layout.mesh).size
        if size != self.num_devices:
            what = "has another number of devices"
            raise ConfigError(Fault("why", what, str(size), need=str(self.num_devices)))
        faults = run_checks(self.run.with_values(layout.values), config_checks)
        if faults:
            raise ConfigError(*_faults_of_why(faults, text))
        return layout

    def costs(self) -> LayoutCosts:
        """Costs of its layouts on the hardware."""
        from weft.planner.measure.measured_run import MeasuredRun  # late: they import torch
        from weft.planner.simulate.speeds import Speeds
        from weft_plan.search.layout_costs import LayoutCosts

        return LayoutCosts(MeasuredRun.of(self.run), Speeds(self.hardware))

    def config_text(self, layout: Layout) -> str:
        """The run with a layout as a config file."""
        return toml.dump(self.run.with_values(layout.values))

    def command(self, layout: Layout) -> str:
        """The run with a layout as a command: the words without keys of the search, then the values
        of the layout for the keys that are given or have another value than the run.
        """
        given = flags.split(self.words)
        words = ["weft", "train", *given.loose]
        for name, values in given.flags:
            if name not in SEARCHED:
                words.extend([f"--{name}", *values])
        changed = changes(self.run, self.run.with_values(layout.values))
        named_keys = ALWAYS_NAMED.union(self.pinned, changed)
        named = {key: value for key, value in layout.values.items() if key in named_keys}
        return f"{shlex.join(words)} {as_flags(named)}"


def _pinned_keys(words: Sequence[str]) -> frozenset[str]:
    """Keys of the search that flags or the config file give."""
    given = flags.split(words)
    names = {name for name, _ in given.flags}
    for path in given.loose:
        is_config = path.endswith(".toml") and Path(path).is_file()
        if not is_config:
            continue
        for key, value in read_with_bases(path).items():
            is_chosen = key == "mesh" and value == AUTO_MESH
            if not is_chosen:
                names.add(key)
    return frozenset(names & SEARCHED)


def _sites(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """The axis of sites of a mesh, with its degree."""
    return tuple(each for each in mesh.axes if each[0] in local_update_axes())


def _is_sites_alone(mesh: Mesh, devices: int | None) -> bool:
    """Whether a mesh names sites and no axis inside of them, which are searched then."""
    has_devices_inside = devices is not None and devices != mesh.size
    return bool(mesh.axes) and mesh.axes == _sites(mesh) and has_devices_inside


def _num_devices(given: int | None, size: int, pinned: frozenset[str]) -> int:
    """The number that is given; else that of a mesh of `size` ranks, if it is pinned."""
    if given is None:
        if "mesh" not in pinned:
            raise ConfigError(Fault("devices", "no number is given", fix="--devices 256"))
        return size
    if "mesh" in pinned and given != size:
        fix = f"--devices {size}, or leave one of them out"
        got = f"--devices {given}, --mesh of {size}"
        raise ConfigError(Fault("devices", "differ from the mesh", got, fix=fix))
    return given


def _faults_of_why(faults: Sequence[Fault], text: str) -> Iterator[Fault]:
    """Faults of a layout as faults of the flag that names it."""
    for fault in faults:
        what = f"{text!r} is not legal: {fault.key}: {fault.what}"
        yield replace(fault, key="why", what=what)
