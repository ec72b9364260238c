"""Evaluation of stored models: loss on any data and layout, and the adapter to lm-evaluation-harness."""

from weft.evaluation.harness import HarnessModel

__all__ = ["HarnessModel"]
