"""Runs compared with transformers, and faults of weft's models that are on both sides of an ordinary proof."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.load import load
from weft.config.small_runs import reduced
from weft.core.attention_mask import AttentionMask
from weft.models import FAMILIES
from weft.models.common import decoder, layers, rope
from weft.models.common.attention import FusedAttention
from weft.models.common.layers import Embed, Loss
from weft.models.common.moe import Balance, Choice
from weft.models.deepseek import model as deepseek
from weft.models.gemma3 import model as gemma3
from weft.models.gpt2 import model as gpt2
from weft.models.mistral import model as mistral
from weft.models.qwen3 import model as qwen3
from weft.prove.against.proof import prove_against
from weft.prove.against.support import check_support
from weft.prove.report import ProofReport
from weft.prove.small_sizes import accepts_sizes
from weft.prove.subject import Subject

Patch = pytest.MonkeyPatch


def opinion_of(words: str, *, steps: int = 3, full: bool = False) -> ProofReport:
    """The comparison of these flags with transformers."""
    run = load(shlex.split(words), FAMILIES)
    mapping = check_support(run.model, run.lora, run.precision, loss=run.loss)
    compared = run if full else reduced(run, accepts_sizes)
    subject = Subject.of(compared, steps=steps)
    return prove_against(subject, mapping=mapping, configured=run.model)


@dataclass(frozen=True)
class Fault:
    """A fault of a model.

    Attributes:
        words: of a run that computes with it.
        plant: changes weft's code.
        tensor: that the report names first.
    """

    words: str
    plant: Callable[[Patch], None]
    tensor: str
    full: bool = False


def _rotary_base(patch: Patch) -> None:
    right = rope.periods
    patch.setattr(
        rope, "periods", lambda n, *, theta, device: right(n, theta=1.01 * theta, device=device)
    )


def _norm_eps(patch: Patch) -> None:
    patch.setattr(decoder, "rms_norm", lambda cfg: nn.RMSNorm(cfg.dim, eps=2 * cfg.norm_eps))


def _smoothed_loss(patch: Patch) -> None:
    def forward(self: Loss, logits: Tensor, batch: Any) -> Tensor:
        targets = batch.targets.flatten()
        options: dict[str, Any] = {"reduction": "sum", "label_smoothing": 1e-3}
        return F.cross_entropy(logits.flatten(0, -2), targets, **options)

    patch.setattr(Loss, "forward", forward)


def _untied(patch: Patch) -> None:
    family = FAMILIES["llama3"]
    patch.setitem(FAMILIES._built_in, "llama3", replace(family, ties=lambda cfg: {}))


def _gate_and_up_exchanged(patch: Patch) -> None:
    family = FAMILIES["llama3"]
    names = {"mlp.gate": "mlp.up", "mlp.up": "mlp.gate"}
    rules = []
    for rule in family.hf.weights.rules:
        for name, other in names.items():
            if name in rule.param:
                rule = replace(rule, param=rule.param.replace(name, other))
                break
        rules.append(rule)
    weights = replace(family.hf.weights, rules=tuple(rules))
    wrong = replace(family, hf=replace(family.hf, weights=weights))
    patch.setitem(FAMILIES._built_in, "llama3", wrong)


def _starting_values(name: str, pattern: str, rule: tuple[Any, ...]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        family = FAMILIES[name]
        right = family.init
        wrong = replace(family, init=lambda cfg: {pattern: rule, **_others(right(cfg), pattern)})
        patch.setitem(FAMILIES._built_in, name, wrong)

    return plant


def _others(table: dict[str, Any], pattern: str) -> dict[str, Any]:
    return {name: rule for name, rule in table.items() if name != pattern}


def _exact_gelu(patch: Patch) -> None:
    """The exact form in place of the tanh form."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out

    patch.setattr(gpt2.GeluMLP, "forward", forward)


def _silu_gate(patch: Patch) -> None:
    patch.setattr(gemma3.GeGLU, "forward", layers.SwiGLU.forward)


def _positions(patch: Patch) -> None:
    """Learned positions counted from the end."""

    def forward(self: Any, tokens: Tensor, batch: Any) -> Tensor:
        x: Tensor = self.tok(tokens) + self.pos(batch.positions.max() - batch.positions)
        return x

    patch.setattr(gpt2.EmbedWithPositions, "forward", forward)


def _window(patch: Patch) -> None:
    patch.setattr(mistral, "AttentionMask", lambda window: AttentionMask(window=window + 1))


def _group_order(patch: Patch) -> None:
    """Query head h reads key/value head h modulo G in place of h / (H / G)."""
    right = FusedAttention.__call__

    def tiled(self: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        group = q.shape[2] // k.shape[2]
        return right(self, q, k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1), *rest)

    patch.setattr(FusedAttention, "__call__", tiled)


def _pairs(module: Any, pairs: str) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        right = rope.rotate
        patch.setattr(module, "rotate", lambda x, turn, **options: right(x, turn, pairs=pairs))

    return plant


def _attention_scale(patch: Patch) -> None:
    right = layers.Attend
    patch.setattr(layers, "Attend", lambda **options: right(scale=0.3, **options))


def _head_norm_eps(patch: Patch) -> None:
    def norm(size: int, eps: float) -> nn.Module:
        return nn.RMSNorm(size, eps=10 * eps)

    right = decoder.attention
    patch.setattr(qwen3, "attention", lambda cfg, **options: right(cfg, qk_norm=norm))


def _no_head_norm(patch: Patch) -> None:
    right = decoder.attention
    patch.setattr(qwen3, "attention", lambda cfg, **options: right(cfg))


def _expert_weights(patch: Patch) -> None:
    """The scores alone: neither normalised nor scaled."""
    patch.setattr(Choice, "weights", lambda self, scores, experts: scores.gather(-1, experts))


def _balance(patch: Patch) -> None:
    right = Balance.forward
    patch.setattr(Balance, "forward", lambda self, *args: 1.5 * right(self, *args))


def _embedding_scale(patch: Patch) -> None:
    patch.setattr(gemma3.ScaledEmbed, "forward", Embed.forward)


def _sharpness(patch: Patch) -> None:
    patch.setattr(rope.YarnScaling, "sharpness", 1.0)


def _best_of_groups(patch: Patch) -> None:
    """Experts of all groups."""
    patch.setattr(Choice, "_in_best_groups", lambda self, scores: scores)


TIED = "--model.tied True"
GROUPED = (
    "--model.layers 2 --model.dim 32 --model.heads 4 --model.kv_heads 2 --model.head_size 8 "
    "--model.ffn 16 --data.seq_len 8 --batch.global_size 4"
)
YARN = "--model.rope_scaling_factor 4 --model.rope_scaling_original_context 8"
GROUPS = (
    "--model.layers 2 --model.dim 32 --model.experts 8 --model.n_group 4 --model.topk_group 1 "
    "--data.seq_len 8 --batch.global_size 4"
)

FAULTS = {
    "llama3, rotary base": Fault("--model.name llama3", _rotary_base, "layer0.output"),
    "llama3, loss": Fault("--model.name llama3", _smoothed_loss, "loss.loss"),
    "llama3, head not tied": Fault(f"--model.name llama3 {TIED}", _untied, "export"),
    "llama3, export": Fault("--model.name llama3", _gate_and_up_exchanged, "layer0.output"),
    "gpt2, form of GELU": Fault("--model.name gpt2", _exact_gelu, "layer0.output"),
    "gpt2, positions": Fault("--model.name gpt2", _positions, "embed.output"),
    "gpt2, starting values": Fault(
        "--model.name gpt2",
        _starting_values("gpt2", "embed.*", ("normal", 0.08)),
        "embed.tok.weight starting value",
    ),
    "mistral, window": Fault("--model.name mistral", _window, "layer0.output"),
    "mistral, order of groups": Fault(
        f"--model.name mistral {GROUPED}", _group_order, "layer0.output", full=True
    ),
    "qwen2, pairs of features": Fault(
        "--model.name qwen2", _pairs(layers, "neighbours"), "layer0.output"
    ),
    "qwen2, scale": Fault("--model.name qwen2", _attention_scale, "layer0.output"),
    "qwen3, eps of the norm of heads": Fault("--model.name qwen3", _head_norm_eps, "layer0.output"),
    "qwen3, no norm of heads": Fault(
        "--model.name qwen3", _no_head_norm, "layer0.attn.q_norm.weight as used"
    ),
    "qwen3, eps of norms": Fault("--model.name qwen3", _norm_eps, "layer0.output"),
    "qwen3-moe, weights of experts": Fault(
        "--model.name qwen3-moe", _expert_weights, "layer0.output"
    ),
    "qwen3-moe, balance loss": Fault(
        "--model.name qwen3-moe --model.balance_loss 0.1", _balance, "layer0.extra loss"
    ),
    "gemma3, gate": Fault("--model.name gemma3", _silu_gate, "layer0.output"),
    "gemma3, scale of the embedding": Fault(
        "--model.name gemma3", _embedding_scale, "embed.output"
    ),
    "gemma3, starting values": Fault(
        "--model.name gemma3",
        _starting_values("gemma3", "*norm.weight", ("ones",)),
        "head.norm.weight starting value",
    ),
    "deepseek, pairs of features": Fault(
        "--model.name deepseek", _pairs(deepseek, "halves"), "layer0.output"
    ),
    "deepseek, sharpness of YaRN": Fault(
        f"--model.name deepseek {YARN}", _sharpness, "layer0.output"
    ),
    "deepseek, groups of experts": Fault(
        f"--model.name deepseek {GROUPS}", _best_of_groups, "layer1.output", full=True
    ),
}
