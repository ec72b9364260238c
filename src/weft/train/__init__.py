"""Training: the step, the loop, optimizers, data loading, evaluation and the event log. `weft.train(...)` trains a run."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A package that is a function, too: the one of its name in `weft.python_api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        function = getattr(importlib.import_module("weft.python_api"), name)
        return function(*args, **kwargs)


sys.modules[__name__].__class__ = CallableModule
