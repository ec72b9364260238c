"""What training across sites sends and waits for: bytes of an outer step, seconds on a link of some speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.schema import SiteConfig
from weft.core.axes import local_update_axis
from weft.core.mesh import WIDTH
from weft.errors import counted
from weft.layout.plan import Plan
from weft.parallel.site import AXIS as SITE
from weft.planner.measure.roles import RoleCosts
from weft.view.quantity import memory as memory_text
from weft.view.quantity import short_time

GIGABIT_BYTES = 1e9 / 8


@dataclass(frozen=True)
class SiteCosts:
    """The exchange of outer gradients between sites, of which each has a link of `site.gbit_s`.

    Attributes:
        num_sites: number of sites.
        rank_bytes: what the rank that sends most sends to each other site in an outer step.
        site_bytes: what the ranks of one site send to each other site in an outer step.
        step_s: predicted seconds of an inner step; None: not known.
    """

    settings: SiteConfig
    num_sites: int
    rank_bytes: int
    site_bytes: int
    step_s: float | None = None

    @property
    def link_bytes(self) -> int:
        """What the link of a site sends in an outer step, and receives."""
        return self.site_bytes * (self.num_sites - 1)

    @property
    def step_bytes(self) -> float:
        """What the link of a site sends, spread over inner steps."""
        return self.link_bytes / self.settings.every

    @property
    def exchange_s(self) -> float | None:
        """Seconds that the link needs for an outer step; None where its speed is not known."""
        if not self.link_bytes:
            return 0.0
        if not self.settings.gbit_s:
            return None
        return self.link_bytes / (self.settings.gbit_s * GIGABIT_BYTES)

    @property
    def exposed_s(self) -> float | None:
        """Seconds of an outer step in which ranks wait for the link; None where they are not known."""
        exchange_s = self.exchange_s
        if exchange_s is None or not self.settings.overlap:
            return exchange_s
        if self.step_s is None:
            return None
        return max(0.0, exchange_s - self.settings.overlap * self.step_s)

    @property
    def mean_step_s(self) -> float | None:
        """Predicted seconds of a step with its share of the outer steps; None where it is not known."""
        if self.step_s is None or self.exposed_s is None:
            return None
        return self.step_s + self.exposed_s / self.settings.every


def site_costs(
    roles: Sequence[RoleCosts], settings: SiteConfig, *, step_s: float | None = None
) -> SiteCosts | None:
    """The account of a measured run; None where its mesh has no sites.

    Args:
        step_s: predicted seconds of an inner step.
    """
    plan: Plan = roles[0].step.plan
    axis = local_update_axis(plan.mesh)
    if axis is None:
        return None
    num_sites = plan.mesh.degree(axis)
    messages = [role.step.outer_bytes for role in roles]
    site_bytes = 0
    for role, num_bytes in zip(roles, messages, strict=True):
        site_bytes += num_bytes * role.num_ranks // num_sites
    return SiteCosts(
        settings=settings,
        num_sites=num_sites,
        rank_bytes=max(messages) if num_sites > 1 else 0,
        site_bytes=site_bytes,
        step_s=step_s,
    )


def site_text(costs: SiteCosts) -> str:
    """The account for a reader."""
    settings = costs.settings
    lines = [
        f"{counted(costs.num_sites, SITE)}: an outer step every"
        f" {counted(settings.every, 'step')}, {settings.wire} on the wire",
        f"  the link of a site sends {memory_text(costs.link_bytes)} in an outer step,"
        f" {memory_text(costs.step_bytes)} a step;",
        f"  a rank at most {memory_text(costs.rank_bytes)} to each other site",
        *_time_lines(costs),
    ]
    return "\n".join(line[:WIDTH] for line in lines)


def _time_lines(costs: SiteCosts) -> list[str]:
    settings = costs.settings
    if costs.exchange_s is None:
        return ["  seconds: the speed of the link is not known; set --site.gbit_s"]
    took = f"  at {settings.gbit_s:g} Gbit/s an exchange takes {short_time(costs.exchange_s)}"
    if costs.exposed_s is None:
        hidden_s = costs.exchange_s / settings.overlap
        steps = counted(settings.overlap, "step")
        return [
            f"{took}, beside {steps}:",
            f"  hidden where a step takes {short_time(hidden_s)} or longer (see --hardware)",
        ]
    waits_s = costs.exposed_s
    return [f"{took}, of which ranks wait", f"  {short_time(waits_s)}: {_share(costs, waits_s)}"]


def _share(costs: SiteCosts, waits_s: float) -> str:
    """The wait, spread over inner steps."""
    each = waits_s / costs.settings.every
    if costs.step_s is None or costs.mean_step_s is None:
        return f"{short_time(each)} a step"
    percent = 100 * each / costs.mean_step_s
    return (
        f"{short_time(each)} a step beside {short_time(costs.step_s)}, {percent:.0f}% of the time"
    )


def site_json(costs: SiteCosts) -> dict[str, Any]:
    """The account as JSON: bytes and seconds; None for what is not known."""
    return {
        "sites": costs.num_sites,
        "every": costs.settings.every,
        "wire": costs.settings.wire,
        "overlap": costs.settings.overlap,
        "rank_bytes": costs.rank_bytes,
        "link_bytes": costs.link_bytes,
        "link_bytes_a_step": costs.step_bytes,
        "exchange_s": costs.exchange_s,
        "exposed_s": costs.exposed_s,
        "mean_step_s": costs.mean_step_s,
    }
