"""Tokens/s of greedy generation with and without a KV cache, and of Hugging Face's `generate` with the same weights, in turns.

python benchmarks/generate.py [--preset llama3-tiny] [--tokens 128 512] [--rounds 5] [--samples 1] [--device cpu] [--wall]

Tokens per CPU second on a CPU; tokens per wall-clock second with --wall and on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.generate.decode import Decoder, TextRow, decode
from weft.generate.sample import Sampling, TokenPosition, sample_token
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.models import FAMILIES, preset
from weft.models.common.batch import chain, token_batch
from weft.models.common.init import init_params, named_parameters, tie
from weft.run.rank_setup import prepare_rank
from weft.train.build import build_model

PROMPT = tuple(b"def main():\n")
SEED = 1
GREEDY = Sampling(temperature=0)

HF_LAYER_NAMES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""Module names of a layer in transformers, by weft's."""


@dataclass(frozen=True)
class Setup:
    """A model and the number of samples of the prompt that are generated at once."""

    config: Any
    samples: int
    device: torch.device
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def prompts(self) -> Tensor:
        """The prompt once for each sample, int64."""
        return torch.tensor([PROMPT] * self.samples, device=self.device)

    def initial_blocks(self) -> dict[str, nn.Module]:
        """The blocks on one device in float32 on the CPU, with tied parameters and initial values."""
        return self._initialized(torch.device("cpu"), torch.float32)

    def typed_blocks(self) -> dict[str, nn.Module]:
        """The blocks on the device and in the dtype of this setup."""
        return self._initialized(self.device, self.torch_dtype)

    def _initialized(
        self,
        device: torch.device,
        dtype: torch.dtype,
    ) -> dict[str, nn.Module]:
        family = FAMILIES[self.config.family]
        ties = family.ties(self.config)
        blocks = {}
        for name, block in family.blocks(self.config).items():
            blocks[name] = block.to(device, dtype)
        tie(blocks, ties)
        params = named_parameters(blocks)
        table = family.init(self.config)
        init_params(params, table, seed=SEED, ties=ties)
        return blocks


@dataclass(frozen=True)
class Generator:
    """One implementation; `generate(num_tokens)` returns the tokens of the first sample behind the prompt."""

    name: str
    generate: Callable[[int], list[int]]


def weft_cached(setup: Setup) -> Generator:
    """The decoder of `weft generate` with an empty cache at each call."""
    config = setup.config
    family = FAMILIES[config.family]
    mesh = Mesh.parse("")
    plan = Plan(
        mesh=mesh,
        family=config.family,
        architecture=canonical_json(config.model_dump()),
        stages=make_stages(config.block_specs(1), 1),
        params=setup.dtype,
        compute=setup.dtype,
        reduce=setup.dtype,
    )
    world = ThreadWorld(1, devices=[setup.device])
    comm = Comm(mesh, 0, world.transport(0))
    model = build_model(family, config, plan, comm, seed=SEED)
    decoder = Decoder(model, vocab=config.vocab)

    def choose(logits_V: Tensor, at: TokenPosition) -> int:
        return sample_token(logits_V, GREEDY, at)

    def generate(num_tokens: int) -> list[int]:
        decoder.reset()
        rows = [TextRow(PROMPT, sample) for sample in range(setup.samples)]
        steps = decode(
            decoder,
            rows,
            choose=choose,
            is_finished=lambda row: len(row.tokens) == num_tokens,
        )
        for _ in steps:
            pass
        return rows[0].tokens

    return Generator("weft, cached", generate)


def weft_uncached(setup: Setup) -> Generator:
    """The model on one device, which computes the whole text again for each token."""
    blocks = setup.typed_blocks()
    inference_blocks = {}
    for name, block in blocks.items():
        is_training_only = name == "loss" or name.startswith("mtp")
        if not is_training_only:
            inference_blocks[name] = block

    @torch.no_grad()
    def generate(num_tokens: int) -> list[int]:
        tokens_BS = setup.prompts
        for _ in range(num_tokens):
            logits_BSV = chain(inference_blocks, tokens_BS, token_batch(tokens_BS, tokens_BS)).x
            next_B1 = logits_BSV[:, -1].argmax(-1, keepdim=True)
            tokens_BS = torch.cat((tokens_BS, next_B1), dim=1)
        return tokens_BS[0, len(PROMPT) :].tolist()

    return Generator("weft, no cache", generate)


def transformers_cached(setup: Setup) -> Generator:
    """transformers' LLaMA with the same weights, its own cache and greedy search."""
    import transformers

    model = transformers.LlamaForCausalLM(hf_config(setup.config))
    model.load_state_dict(hf_state_dict(setup))
    model = model.to(setup.device, setup.torch_dtype).eval()

    def generate(num_tokens: int) -> list[int]:
        prompts = setup.prompts
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(PROMPT) :].tolist()

    return Generator("transformers", generate)


def hf_config(config: Any) -> Any:
    """transformers' config of the same architecture."""
    import transformers

    return transformers.LlamaConfig(
        num_hidden_layers=config.layers,
        hidden_size=config.dim,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.ffn,
        vocab_size=config.vocab,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied,
        rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


def hf_state_dict(setup: Setup) -> dict[str, Tensor]:
    """The initial weights under transformers' names."""
    weights = named_parameters(setup.initial_blocks())
    state = {
        "model.embed_tokens.weight": weights["embed.tok.weight"],
        "model.norm.weight": weights["head.norm.weight"],
        "lm_head.weight": weights["head.proj.weight"],
    }
    for layer in range(setup.config.layers):
        for name, hf_name in HF_LAYER_NAMES.items():
            weight = weights[f"layer{layer}.{name}.weight"]
            state[f"model.layers.{layer}.{hf_name}.weight"] = weight
    return state


def num_equal_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    count = 0
    for a, b in zip(left, right, strict=True):
        if a != b:
            break
        count += 1
    return count


def time_in_turns(
    generators: Sequence[Generator],
    num_tokens: int,
    *,
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Seconds of each generator, one after the other in every round."""
    seconds: dict[str, list[float]] = {generator.name: [] for generator in generators}
    for _ in range(rounds):
        for generator in generators:
            start = clock()
            generator.generate(num_tokens)
            seconds[generator.name].append(clock() - start)
    return seconds


def compare(
    generators: Sequence[Generator],
    num_tokens: int,
    args: argparse.Namespace,
) -> None:
    """Time all generators at one length, and print their speeds and whether they generate the same tokens."""
    is_wall_clock = args.wall or args.device != "cpu"
    clock = time.perf_counter if is_wall_clock else time.process_time
    unit = "tokens/s" if is_wall_clock else "tokens per CPU second"
    texts = [generator.generate(num_tokens) for generator in generators]  # also the warm-up
    seconds = time_in_turns(generators, num_tokens, rounds=args.rounds, clock=clock)
    length = f"{args.samples} x {num_tokens} tokens behind {len(PROMPT)}"
    print(
        f"{args.preset}, {length}, {args.device}, {args.dtype}: {unit}, medians of {args.rounds}, measured"
    )
    weft_s = seconds[generators[0].name]
    weft_text = texts[0]
    for generator, text in zip(generators, texts, strict=True):
        own_s = seconds[generator.name]
        speed = num_tokens * args.samples / statistics.median(own_s)
        ratio = median_ratio(own_s, weft_s)
        equal = num_equal_tokens(weft_text, text)
        columns = [
            f"  {generator.name:<16}{speed:>9,.0f}",
            f"weft is {ratio:.2f} times as fast",
            f"first {equal} tokens equal",
        ]
        print("   ".join(columns))


def median_ratio(own_s: Sequence[float], weft_s: Sequence[float]) -> float:
    """Median over rounds of how many times as fast weft is."""
    ratios = []
    for own_round_s, weft_round_s in zip(own_s, weft_s, strict=True):
        ratios.append(own_round_s / weft_round_s)
    return statistics.median(ratios)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama3-tiny", help="model with random values")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[128, 512], help="numbers of new tokens"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each side")
    parser.add_argument("--samples", type=int, default=1, help="texts at once")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="type of parameters and computation")
    parser.add_argument(
        "--wall", action="store_true", help="wall-clock seconds; default on a CPU: CPU seconds"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    prepare_rank(1)
    setup = Setup(
        preset(args.preset),
        args.samples,
        torch.device(args.device),
        args.dtype,
    )
    generators = [
        weft_cached(setup),
        weft_uncached(setup),
        transformers_cached(setup),
    ]
    for num_tokens in args.tokens:
        compare(generators, num_tokens, args)


if __name__ == "__main__":
    main()
