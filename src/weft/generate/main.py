"""`weft generate` on the ranks: start or join them, generate all texts of a job; and the text that a training run samples."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.source import Source
from weft.comm.comm import Comm
from weft.config.command_options import json_writer
from weft.config.schema import DataConfig
from weft.core.model_config import ModelConfig
from weft.data.prepared import tokenizer_of
from weft.errors import counted
from weft.generate.cache import restored_modules
from weft.generate.decode import ChooseToken, Decoder, TextRow, decode, load_model
from weft.generate.detokenize import GeneratedText
from weft.generate.job import GenerationJob, ModelJob, max_positions
from weft.generate.model_source import ModelSource
from weft.generate.output import JsonOutput, OutputText, TextOutput, to_stdout
from weft.generate.request import SamplingOptions
from weft.generate.sample import Sampling, TokenPosition, sample_token
from weft.hf.folder import HfFolder
from weft.parallel.model.parallelize import ParallelModel
from weft.run.devices import choose_device
from weft.run.launch import join, launch
from weft.run.rank_setup import open_comm
from weft.run.world import World, detect
from weft.train.build import family_of

TRAINING_TEMPERATURE = 0.8
"""Of the texts that a training run samples."""


def generate(job: GenerationJob) -> int:
    """Generate on the ranks that torchrun or Slurm has started, or on local ones started here; the
    exit code.
    """
    mesh = job.request.device_mesh
    main = partial(generate_rank, job)
    world = detect(os.environ)
    if world is not None:
        return join(main, world, mesh=mesh)
    return launch(
        main, mesh.size, transport=job.request.transport, device=job.request.device, mesh=mesh
    )


def generate_rank(job: GenerationJob, world: World) -> None:
    """Entry point of one rank; the first one shows what all of them generate."""
    device = choose_device(job.request.device, world)
    with open_comm(world, job.request.device_mesh, device) as comm:
        decoder = open_decoder(job, comm)
        texts = TextBatch(job)
        if world.rank == 0:
            output = make_output(job, texts)
        else:
            output = None
        for _ in texts.generate(decoder):
            if output is not None:
                output.update()
            comm.checked = False  # every further token repeats the same operations
        if world.rank == 0:
            for line in texts.summary():
                sys.stderr.write(f"{line}\n")


def open_decoder(job: ModelJob, comm: Comm) -> Decoder:
    """This rank's part of the stored model, ready to read tokens."""
    stored = open_source(job.source)
    family = family_of(job.config, job.source.run.lora)
    model = load_model(family, job.config, stored, plan=job.plan, comm=comm)
    vocab = job.config.axis_sizes()["vocab"]
    return Decoder(model, vocab=vocab, max_positions=job.max_positions)


def make_output(job: GenerationJob, texts: TextBatch) -> TextOutput | JsonOutput:
    """The output format that is asked for."""
    if job.request.json is not None:
        facts = {"model": str(job.source.path), "seed": job.request.seed}
        write = json_writer(job.request.json, to_stdout)
        return JsonOutput(texts.output_texts(), write=write, facts=facts)
    return TextOutput(texts.output_texts(), write=to_stdout, is_terminal=sys.stdout.isatty())


def open_source(source: ModelSource) -> Source:
    """The stored parameters."""
    if source.kind == "hf":
        return HfFolder(source.path, source.run.model)
    return open_checkpoint(source.path).section("model")


class TextBatch:
    """The texts of one job in progress: rows of tokens, their text, and the time they took. Equal
    on every rank.
    """

    def __init__(self, job: GenerationJob) -> None:
        self.job = job
        self.rows: list[TextRow] = []
        self.texts: dict[int, GeneratedText] = {}
        self.outputs: list[OutputText] = []
        self.first_token_s = 0.0
        self.later_tokens_s = 0.0
        for prompt, tokens in zip(job.prompts, job.tokens, strict=True):
            for sample in range(job.request.samples):
                self._add_row(prompt, TextRow(tokens, sample))

    def _add_row(self, prompt: str, row: TextRow) -> None:
        text = GeneratedText(
            self.job.tokenizer, stop=self.job.request.stop, end_tokens=self.job.end_tokens
        )
        self.rows.append(row)
        self.texts[id(row)] = text
        self.outputs.append(
            OutputText(prompt=prompt, sample=row.sample, tokens=row.tokens, generated=text)
        )

    def output_texts(self) -> list[OutputText]:
        """The texts for the output; they change as tokens arrive."""
        return self.outputs

    def generate(self, decoder: Decoder) -> Iterator[None]:
        """Generate them; yields after each token. Every rank must iterate to the end."""
        choose = sampler(self.job.request)
        started = time.perf_counter()
        first_token = started
        steps = decode(decoder, self.rows, choose=choose, is_finished=self._take_newest)
        for _ in steps:
            # the first one reads the prompts, which is measured by itself
            if not self.first_token_s:
                first_token = time.perf_counter()
                self.first_token_s = first_token - started
            self.later_tokens_s = time.perf_counter() - first_token
            yield

    def _take_newest(self, row: TextRow) -> bool:
        """Add the row's newest token to its text; whether the text is finished."""
        text = self.texts[id(row)]
        text.add(row.tokens[-1])
        num_positions = len(row.prompt) + len(row.tokens)
        if text.finish_reason is not None:
            return True
        if len(row.tokens) == self.job.request.tokens:
            text.finish("length")
        # of the row's own text: the longest prompt of a batch does not end the others
        elif num_positions == self.job.max_positions:
            text.finish("context")
        return text.finish_reason is not None

    def summary(self) -> list[str]:
        """How many tokens in which time, measured, and why texts ended early."""
        num_tokens = sum(len(row.tokens) for row in self.rows)
        num_prompt_tokens = sum(len(row.prompt) for row in self.rows)
        num_later = num_tokens - len(self.rows)
        speed = ""
        if num_later and self.later_tokens_s:
            tokens_per_s = num_later / self.later_tokens_s
            speed = f", then {tokens_per_s:,.0f} tokens/s"
        prompt_ms = 1e3 * self.first_token_s
        tokens = counted(num_tokens, "token")
        prompt_tokens = counted(num_prompt_tokens, "token")
        line = f"{tokens}; {prompt_tokens} of prompt read in {prompt_ms:,.0f} ms{speed} (measured)"
        return [line, *self._early_ends()]

    def _early_ends(self) -> Iterator[str]:
        """Notes on texts that are shorter than asked for, and on a stop text that did not come."""
        reasons = [self.texts[id(row)].finish_reason for row in self.rows]
        num_texts = len(reasons)
        num_full = reasons.count("context")
        if num_full:
            last_position = self.job.max_positions
            yield f"note: {num_full} of {num_texts} texts end with the model's last position, {last_position}"
        num_stopped = reasons.count("stop")
        if self.job.request.stop and num_stopped < num_texts:
            yield f"note: the stop text came in {num_stopped} of {num_texts} texts"


def sampler(request: SamplingOptions) -> ChooseToken:
    """The function that samples as the options say."""
    sampling = Sampling(
        temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, seed=request.seed
    )
    return partial(_sample_with, sampling)


def _sample_with(sampling: Sampling, logits_V: Tensor, at: TokenPosition) -> int:
    return sample_token(logits_V, sampling, at)


def sample_trained(
    model: ParallelModel,
    prompt: str,
    *,
    config: ModelConfig,
    data: DataConfig,
    num_tokens: int,
    seed: int,
    on_token: Callable[[], object] = lambda: None,
) -> str:
    """Text of `num_tokens` tokens that a model which trains continues `prompt` with, on its mesh.

    Every rank takes part and returns it; a model with learned positions stops at its last one. The
    model can be trained on: nothing is drawn from a generator, and its modules are put back.

    Args:
        on_token: called before each token.
    """
    tokenizer = tokenizer_of(data)
    row = TextRow(tuple(tokenizer.encode(prompt)) or (0,))
    limit = max_positions(config)

    def is_finished(row: TextRow) -> bool:
        num_positions = len(row.prompt) + len(row.tokens)
        return len(row.tokens) == num_tokens or num_positions == limit

    choose = partial(_sample_with, Sampling(TRAINING_TEMPERATURE, seed=seed))
    with restored_modules(model.stages):
        on_token()
        decoder = Decoder(model, vocab=config.axis_sizes()["vocab"], max_positions=limit)
        for _ in decode(decoder, [row], choose=choose, is_finished=is_finished):
            on_token()
    return tokenizer.decode(row.tokens)
