"""Training: the step, the loop, optimizers, data loading, evaluation and the event log. `weft.train(...)` trains a run."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """This package, which is a function, too: see `weft.python_api.train`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("weft.python_api").train(*args, **kwargs)


sys.modules[__name__].__class__ = CallableModule
