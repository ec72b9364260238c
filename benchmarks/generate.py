"""Tokens/s of greedy text with and without a cache, and of Hugging Face's `generate` with the same weights, turn by turn.

python benchmarks/generate.py [--preset llama3-tiny] [--tokens 128 512] [--rounds 5] [--samples 1] [--device cpu] [--wall]

Speeds are per second of computing on a CPU, of the clock with --wall and on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.generate.decode import Decoder, TextRow, decode
from weft.generate.sample import Sampling, sample_token
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.models import FAMILIES, preset
from weft.models.common.batch import chain, token_batch
from weft.models.common.init import init_params, named_parameters, tie
from weft.run.rank_setup import prepare_rank
from weft.train.build import build_model

PROMPT = tuple(b"def main():\n")
SEED = 1


@dataclass(frozen=True)
class Way:
    """One way to write `num_tokens` tokens behind the prompt, for so many rows at once."""

    name: str
    write: Callable[[int], list[int]]


def ours(config, samples: int, device: torch.device, dtype: str) -> Way:
    """`weft generate` without its command: a fresh cache each time."""
    family, mesh = FAMILIES[config.family], Mesh.parse("")
    kinds = {"params": dtype, "compute": dtype, "reduce": dtype}
    stages = make_stages(config.block_specs(1), 1)
    plan = Plan(
        mesh=mesh, family=config.family, architecture=canonical_json(config.model_dump()), stages=stages, **kinds
    )
    comm = Comm(mesh, 0, ThreadWorld(1, devices=[device]).transport(0))
    decoder = Decoder(build_model(family, config, plan, comm, seed=SEED), vocab=config.vocab)
    greedy = Sampling(temperature=0)

    def write(num_tokens: int) -> list[int]:
        decoder.reset()
        rows = [TextRow(PROMPT, sample) for sample in range(samples)]
        choose = lambda logits_V, at: sample_token(logits_V, greedy, at)  # noqa: E731
        for _ in decode(decoder, rows, choose=choose, is_finished=lambda row: len(row.tokens) == num_tokens):
            pass
        return rows[0].tokens

    return Way("weft, cached", write)


def anew(config, samples: int, device: torch.device, dtype: str) -> Way:
    """The plain model reads everything anew for each token."""
    family = FAMILIES[config.family]
    blocks = {name: block.to(device, getattr(torch, dtype)) for name, block in family.blocks(config).items()}
    tie(blocks, family.ties(config))
    params = named_parameters(blocks)
    init_params(params, family.init(config), seed=SEED, ties=family.ties(config))
    kept = {name: block for name, block in blocks.items() if name != "loss" and not name.startswith("mtp")}

    @torch.no_grad()
    def write(num_tokens: int) -> list[int]:
        tokens = torch.tensor([PROMPT] * samples, device=device)
        for _ in range(num_tokens):
            logits: Tensor = chain(kept, tokens, token_batch(tokens, tokens)).x[:, -1]
            tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
        return tokens[0, len(PROMPT) :].tolist()

    return Way("weft, no cache", write)


def theirs(config, samples: int, device: torch.device, dtype: str) -> Way:
    """transformers' LLaMA with our weights, its own cache and greedy search."""
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
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
    )
    family = FAMILIES[config.family]
    blocks = family.blocks(config)
    tie(blocks, family.ties(config))
    weights = named_parameters(blocks)
    init_params(weights, family.init(config), seed=SEED, ties=family.ties(config))
    names = {
        **{f"attn.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
        **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    state = {
        "model.embed_tokens.weight": weights["embed.tok.weight"],
        "model.norm.weight": weights["head.norm.weight"],
        "lm_head.weight": weights["head.proj.weight"],
        **{
            f"model.layers.{i}.{their}.weight": weights[f"layer{i}.{our}.weight"]
            for i in range(config.layers)
            for our, their in names.items()
        },
    }
    model.load_state_dict(state)
    model = model.to(device, getattr(torch, dtype)).eval()

    def write(num_tokens: int) -> list[int]:
        tokens = torch.tensor([PROMPT] * samples, device=device)
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        return out[0, len(PROMPT) :].tolist()

    return Way("transformers", write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama3-tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--wall", action="store_true", help="seconds of the clock; on a CPU seconds of computing else")
    asked = parser.parse_args()
    prepare_rank(1)
    clock = time.perf_counter if asked.wall or asked.device != "cpu" else time.process_time
    config, device = preset(asked.preset), torch.device(asked.device)
    ways = [make(config, asked.samples, device, asked.dtype) for make in (ours, anew, theirs)]
    for num in asked.tokens:
        texts = [way.write(num) for way in ways]  # warms up, and shows that all write the same
        alike = [
            next((at for at, (a, b) in enumerate(zip(texts[0], text, strict=True)) if a != b), num) for text in texts
        ]
        taken: dict[str, list[float]] = {way.name: [] for way in ways}
        for _ in range(asked.rounds):
            for way in ways:
                start = clock()
                way.write(num)
                taken[way.name].append(clock() - start)
        best = {name: num * asked.samples / statistics.median(seconds) for name, seconds in taken.items()}
        what = f"{asked.preset}, {asked.samples} x {num} tokens behind {len(PROMPT)}, {device}, {asked.dtype}"
        print(f"{what}: tokens/s, medians of {asked.rounds}")
        for (name, speed), same in zip(best.items(), alike, strict=True):
            ratio = statistics.median(b / a for a, b in zip(taken["weft, cached"], taken[name], strict=True))
            print(f"  {name:<16}{speed:>9,.0f}   weft is {ratio:.2f} times as fast   first {same} tokens alike")


if __name__ == "__main__":
    main()
