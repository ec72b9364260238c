"""Where a checkpoint holds what a run needs, if it was written by another number of sites, or without any. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

SITE_SECTION = re.compile(r"site/(\d+)/(.+)")

# Note [Sites leave and return]
# The outer parameters and their momentum are those of the checkpoint, however many sites there are. Site k goes on from
# what site k had: its parameters and the state of its inner optimizer. A site that the checkpoint does not know begins
# with the outer parameters and a copy of the optimizer state of site k modulo the number of stored sites. A checkpoint
# without sites is taken as outer parameters without momentum; a run without sites takes the outer parameters and the
# optimizer state of site 0.


def stored_section(wanted: str, stored: Collection[str]) -> str | None:
    """The section of a checkpoint that a state reads for `wanted`; None where it keeps its initial
    value. See Note [Sites leave and return].

    >>> stored_section("site/2/optim/exp_avg", ["model", "site/0/optim/exp_avg", "site/1/optim/exp_avg"])
    'site/0/optim/exp_avg'
    """
    if wanted in stored:
        return wanted
    match = SITE_SECTION.fullmatch(wanted)
    if match is not None:
        index = int(match[1])
        section = match[2]
        if section == "model":
            return section
        num_sites = num_stored_sites(stored)
        if num_sites:
            return f"site/{index % num_sites}/{section}"
        return section
    if wanted.startswith("site/"):
        return None
    of_first_site = f"site/0/{wanted}"
    if of_first_site in stored:
        return of_first_site
    return wanted


def num_stored_sites(stored: Collection[str]) -> int:
    """How many sites wrote a checkpoint with these sections; 0: it was written without sites."""
    found = set()
    for section in stored:
        match = SITE_SECTION.fullmatch(section)
        if match is not None:
            found.add(int(match[1]))
    return len(found)


def inner_section(section: str) -> str:
    """The section without the site that it belongs to: `optim/exp_avg`."""
    match = SITE_SECTION.fullmatch(section)
    if match is None:
        return section
    return match[2]


def is_of_sites(stored_name: str) -> bool:
    """Whether a stored tensor belongs to one site or to the outer optimizer."""
    return stored_name.startswith("site/")
