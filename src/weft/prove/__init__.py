"""Comparison of a layout, or of a recorded run, with one device. `weft.prove(...)` makes one."""

from __future__ import annotations

import sys

from weft.train import CallableModule

sys.modules[__name__].__class__ = CallableModule
