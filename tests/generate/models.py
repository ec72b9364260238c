"""Models for tests of generation: tiny ones of every family, layouts, tensors in memory, the reference without a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from tests.memory_source import Memory
from tests.one_device import plain_model
from tests.small_models import TEXT_FAMILIES, small_fields
from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.generate.decode import Decoder, TextRow, decode, load_model
from weft.generate.sample import Sampling, TokenPosition, sample_token
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.models import FAMILIES
from weft.models.common.batch import chain, token_batch
from weft.models.common.init import named_parameters
from weft.testing import run_ranks

T = TypeVar("T")
SEED, VOCAB = 5, 53

CONFIGS: dict[str, dict[str, object]] = {
    "gpt2": {"layers": 2, "dim": 32, "heads": 4, "ffn": 48, "max_seq_len": 40},
    "llama3": {"layers": 3, "dim": 32, "heads": 8, "kv_heads": 4, "ffn": 48},
    "qwen3": {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "head_size": 6, "ffn": 48, "tied": True},
    "qwen3-moe": {
        "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "head_size": 8, "experts": 8, "top_k": 3, "expert_ffn": 16,
    },
    "deepseek": {
        "layers": 3, "first_k_dense": 1, "dim": 32, "heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "ffn": 48,
        "experts": 8, "top_k": 2, "expert_ffn": 16, "n_group": 4, "topk_group": 2, "mtp_depth": 1,
        "rope_scaling_factor": 4.0, "rope_scaling_original_context": 16,
    },
}  # fmt: skip
CONFIGS |= {name: small_fields(name) for name in TEXT_FAMILIES if name not in CONFIGS}
"""Vocabulary 53 is cut unevenly, two query heads share a head of keys in three of them, YaRN scales
the scores of one.
"""

PROMPTS = ((1, 2, 3, 4, 5, 6, 7), (9,), (50, 3, 50, 3), (8, 30, 31, 2))
GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=3)


def config_of(family: str, **changes: object) -> ModelConfig:
    """The tiny config of a family."""
    return FAMILIES[family].Config(**{"vocab": VOCAB, **CONFIGS[family], **changes})


def plain(config: ModelConfig) -> dict[str, nn.Module]:
    """The plain model in float64, every weight moved far from its start, so that each one matters
    to every token.
    """
    blocks = plain_model(FAMILIES[config.family], config, seed=SEED, dtype=torch.float64)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for param in {id(param): param for param in named_parameters(blocks).values()}.values():
            param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype) * 0.15)
    return blocks


def stored(config: ModelConfig, blocks: Mapping[str, nn.Module]) -> Memory:
    """A model's tensors as a checkpoint has them: a tied one under its owner's name."""
    ties = FAMILIES[config.family].ties(config)
    return Memory(
        {name: p.detach() for name, p in named_parameters(blocks).items() if name not in ties}
    )


def plan_of(config: ModelConfig, mesh: str) -> Plan:
    """A layout for generation, in float64."""
    grid = Mesh.parse(mesh)
    return Plan(
        mesh=grid,
        family=config.family,
        architecture=canonical_json(config.model_dump()),
        stages=make_stages(config.block_specs(1), grid.degree("pp")),
        params="float64",
        compute="float64",
        reduce="float64",
    )


def on_ranks(config: ModelConfig, mesh: str, act: Callable[[Decoder], T]) -> list[T]:
    """`act(decoder)` on every rank of a mesh that has loaded the plain model's tensors."""
    source = stored(config, plain(config))
    plan = plan_of(config, mesh)

    def rank(comm: Comm) -> T:
        model = load_model(FAMILIES[config.family], config, source, plan=plan, comm=comm)
        vocab = config.axis_sizes()["vocab"]
        return act(Decoder(model, vocab=vocab))

    return run_ranks(mesh, rank)


@dataclass(frozen=True)
class Generation:
    """What a decoder makes of prompts, and the logits from which each token was sampled, by prompt,
    on last stages.
    """

    prompts: Sequence[tuple[int, ...]] = PROMPTS
    num_tokens: int = 10
    sampling: Sampling = GREEDY

    def __call__(self, decoder: Decoder) -> tuple[list[list[int]], dict[int, list[Tensor]]]:
        logits: dict[int, list[Tensor]] = {}

        def choose(logits_V: Tensor, at: TokenPosition) -> int:
            logits.setdefault(at.sample, []).append(logits_V.clone())
            return sample_token(logits_V, self.sampling, at)

        rows = [TextRow(prompt, sample=number) for number, prompt in enumerate(self.prompts)]
        for _ in decode(
            decoder, rows, choose=choose, is_finished=lambda row: len(row.tokens) == self.num_tokens
        ):
            pass
        return [row.tokens for row in rows], logits

    def reference(self, config: ModelConfig) -> tuple[list[list[int]], dict[int, list[Tensor]]]:
        """The same from the plain model: each prompt alone, the whole sequence forward for each
        token.
        """
        return self.reference_of(plain(config))

    def reference_of(
        self, blocks: Mapping[str, nn.Module]
    ) -> tuple[list[list[int]], dict[int, list[Tensor]]]:
        """The same, from these blocks."""
        kept = {
            name: block for name, block in blocks.items() if not name.startswith(("loss", "mtp"))
        }
        texts: list[list[int]] = []
        logits: dict[int, list[Tensor]] = {}
        for sample, prompt in enumerate(self.prompts):
            tokens = list(prompt)
            for _ in range(self.num_tokens):
                inputs = torch.tensor([tokens])
                with torch.no_grad():
                    out = chain(kept, inputs, token_batch(inputs, inputs))
                    last_V = out.x[0, -1]
                logits.setdefault(sample, []).append(last_V)
                tokens.append(
                    sample_token(last_V, self.sampling, TokenPosition(sample, len(tokens)))
                )
            texts.append(tokens[len(prompt) :])
        return texts, logits


def worst(ours: Mapping[int, Sequence[Tensor]], theirs: Mapping[int, Sequence[Tensor]]) -> float:
    """The largest difference of two runs' logits, relative to the largest logit."""
    return max(
        ((our - their).abs().max() / their.abs().max()).item()
        for sample in ours
        for our, their in zip(ours[sample], theirs[sample], strict=True)
    )
