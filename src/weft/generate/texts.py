"""Owns the texts of one job under way: rows of tokens and what they spell, when each is over, how fast they came."""

from __future__ import annotations

import time
from collections.abc import Iterator

from weft.generate.decode import Decoder
from weft.generate.draw import Sampling, draw
from weft.generate.job import Job
from weft.generate.rows import Row, grow
from weft.generate.show import Shown
from weft.generate.text import Writing


class Texts:
    """Every rank has them all; they differ on no rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        asked = job.request
        self.rows = [Row(tokens, sample) for tokens in job.tokens for sample in range(asked.samples)]
        self.writings = {id(row): Writing(job.tokenizer, stop=asked.stop, ends=job.ends) for row in self.rows}
        self.first_s, self.rest_s = 0.0, 0.0

    def shown(self) -> list[Shown]:
        """As they are to be seen; they go on changing."""
        prompts = [text for text in self.job.prompts for _ in range(self.job.request.samples)]
        return [
            Shown(prompt, row.sample, row.tokens, self.writings[id(row)])
            for prompt, row in zip(prompts, self.rows, strict=True)
        ]

    def written(self, decoder: Decoder) -> Iterator[None]:
        """Write them; yields after each token. Every rank must iterate to the end."""
        asked = self.job.request
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
        start = before = time.perf_counter()
        for _ in grow(
            decoder, self.rows, choose=lambda logits_V, place: draw(logits_V, sampling, place), is_over=self._take
        ):
            if not self.first_s:
                self.first_s, before = time.perf_counter() - start, time.perf_counter()
            self.rest_s = time.perf_counter() - before
            yield

    def _take(self, row: Row) -> bool:
        """Spell the row's newest token; whether the text is over."""
        writing = self.writings[id(row)]
        writing.take(row.tokens[-1])
        if writing.end is None and len(row.tokens) == self.job.request.tokens:
            writing.close("length")
        if writing.end is None and len(row.prompt) + len(row.tokens) == self.job.context:
            writing.close("context")
        return writing.end is not None

    def summary(self) -> list[str]:
        """How many tokens in which time, measured, and why texts ended early."""
        num, read = sum(len(row.tokens) for row in self.rows), sum(len(row.prompt) for row in self.rows)
        later = num - len(self.rows)
        speed = f", then {later / self.rest_s:,.0f} tokens/s" if later and self.rest_s else ""
        line = f"{num} tokens; {read} tokens of prompt read in {1e3 * self.first_s:,.0f} ms{speed} (measured)"
        return [line, *self._early()]

    def _early(self) -> Iterator[str]:
        ends = [self.writings[id(row)].end for row in self.rows]
        if full := ends.count("context"):
            yield f"note: {full} of {len(ends)} texts end with the model's last position, {self.job.context}"
        if self.job.request.stop and (found := ends.count("stop")) < len(ends):
            yield f"note: the stop text came in {found} of {len(ends)} texts"
