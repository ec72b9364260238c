"""Small public results on one device and on layouts: trains them, and writes their figures, reports and pictures.

    python -m benchmarks.results [NAME ...]      all of RESULTS, or those of these names; `make results`

Each run is a command that a user can type; its folder stays under runs/results. For each result docs/results has a
JSON file with the figures and curves, from which `results_page` draws the tables of docs/results.md and the pictures,
and the page of `weft report` over its runs.
"""

from __future__ import annotations

import json
import lzma
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.results_page import FOLDER, differences, write_page

from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.resume import find_checkpoint
from weft.config.load import load
from weft.core.axes import Box
from weft.data.images import read_pair
from weft.models import FAMILIES
from weft.models.common.batch import Batch
from weft.report.downsample import downsampled
from weft.report.page import report_page
from weft.report.recorded_values import RunRecord

RUNS = Path("runs/results")
DATA = Path("examples/data")
PAIRS = RUNS / "pairs"
BASE = RUNS / "base"
"""The model of the first result for transformers, from which the preference run starts."""
NUM_PAIRS = {"train": 320, "valid": 64}
MOST_CHARS = 40
"""Of a line of a preference pair."""
MOST_POINTS = 400
"""Of a curve in a JSON file."""
SHAKESPEARE = (
    f"--data.source {DATA}/shakespeare/train.txt.xz --eval.source {DATA}/shakespeare/valid.txt.xz"
)
FLOAT64 = "--precision.params float64 --precision.compute float64 --precision.reduce float64"
COMMON = "--report False --save.at_end False --prove.during 0"


@dataclass(frozen=True)
class Result:
    """One result: runs that share a config and differ in their layout.

    Attributes:
        title: in tables and pictures.
        words: of `weft train`, of all runs.
        runs: label -> further words.
        compared: label -> the run with which it is compared; the others are on one device and are
            compared with none.
        prepare: what is done before the first run.
    """

    title: str
    words: str
    runs: Mapping[str, str]
    compared: Mapping[str, str]
    prepare: Callable[[], None] = field(default=lambda: None)


def write_pairs() -> None:
    """Lines of Shakespeare with the line that follows, in capitals (chosen) and as written; and the
    model that has read them.
    """
    PAIRS.mkdir(parents=True, exist_ok=True)
    for split, count in NUM_PAIRS.items():
        text = lzma.decompress((DATA / "shakespeare" / f"{split}.txt.xz").read_bytes()).decode()
        lines = [line[:MOST_CHARS] for line in text.splitlines() if len(line) > 20]
        draw = random.Random(0)
        with (PAIRS / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                place = draw.randrange(len(lines) - 1)
                prompt, line = f"{lines[place]}\n", lines[place + 1]
                pair = {"prompt": prompt, "chosen": line.upper(), "rejected": line}
                file.write(json.dumps(pair) + "\n")
    shutil.rmtree(BASE, ignore_errors=True)
    weft("export", str(RUNS / "shakespeare" / "one"), str(BASE))


RESULTS: Mapping[str, Result] = {
    "shakespeare": Result(
        "Characters of Shakespeare, nanoGPT's model and settings for a CPU",
        f"--model.name gpt2 --model.layers 4 --model.dim 128 --model.heads 4 {SHAKESPEARE} --data.seq_len 64"
        " --eval.every 250 --batch.global_size 12 --optim.lr 1e-3 --optim.min_lr 0.1 --optim.betas 0.9 0.99"
        " --optim.warmup 100 --optim.decay cosine --steps 2000 --seed 1337",
        {
            "one": "--batch.micro_size 12 --save.at_end True",
            "pp2": "--mesh pp2 --batch.micro_size 3",
        },
        {"pp2": "one"},
    ),
    "speedrun": Result(
        "GPT-2 in small (12 layers, 12 heads): AdamW, and Muon as in the speed-runs",
        f"--model.name gpt2 --model.layers 12 --model.dim 96 --model.heads 12 {SHAKESPEARE} --data.seq_len 64"
        " --eval.every 20 --eval.batches 50 --batch.global_size 8 --optim.warmup 20 --optim.decay linear"
        " --optim.min_lr 0 --steps 160",
        {
            "adamw one": "--optim.lr 2e-3 --batch.micro_size 8",
            "adamw pp2 dp2": '--optim.lr 2e-3 --mesh "pp2 dp2" --batch.micro_size 4',
            "muon one": "--optim.name muon --optim.options.adjust_lr_fn match_rms_adamw --optim.lr 4e-3 --batch.micro_size 8",
            "muon dp2 zero 1": "--optim.name muon --optim.options.adjust_lr_fn match_rms_adamw --optim.lr 4e-3"
            " --mesh dp2 --parallel.zero 1 --batch.micro_size 4",
        },
        {"adamw pp2 dp2": "adamw one", "muon dp2 zero 1": "muon one"},
    ),
    "mnist": Result(
        "MNIST: the first 4,000 images of its test set, evaluated on the next 1,000",
        f"--model.name mnist --data.source {DATA}/mnist/train --eval.source {DATA}/mnist/valid"
        " --eval.every 50 --batch.global_size 64 --optim.lr 2e-3 --optim.decay cosine --steps 300 --save.at_end True",
        {
            "float32 one": "--batch.micro_size 64",
            "float32 one of 16": "--batch.micro_size 16",
            "float32 dp4": "--mesh dp4 --batch.micro_size 16",
            "float64 one": f"{FLOAT64} --batch.micro_size 64",
            "float64 dp4": f"{FLOAT64} --mesh dp4 --batch.micro_size 16",
            "float64 pp2 tp2": f'{FLOAT64} --mesh "pp2 tp2" --batch.micro_size 16',
        },
        {
            "float32 one of 16": "float32 one",
            "float32 dp4": "float32 one of 16",
            "float64 dp4": "float64 one",
            "float64 pp2 tp2": "float64 one",
        },
    ),
    "dpo": Result(
        "DPO: lines in capitals are preferred, from the model of Shakespeare",
        f"--model.from_hf {BASE} --data.source {PAIRS}/train.jsonl --data.format preference"
        f" --eval.source {PAIRS}/valid.jsonl --loss dpo --data.seq_len 160 --eval.every 10 --batch.global_size 16"
        " --optim.lr 1e-4 --optim.warmup 5 --optim.decay cosine --steps 30",
        {"one": "--batch.micro_size 16", "tp2": "--mesh tp2 --batch.micro_size 8"},
        {"tp2": "one"},
        write_pairs,
    ),
}


def weft(*words: str) -> None:
    """Run the program, as a user would."""
    command = [sys.executable, "-m", "weft", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def folder_of(name: str, label: str) -> Path:
    """The folder of a run."""
    return RUNS / name / label.replace(" ", "-")


def train(name: str, label: str) -> Path:
    """Train one run anew; its folder."""
    result = RESULTS[name]
    folder = folder_of(name, label)
    shutil.rmtree(folder, ignore_errors=True)
    weft(
        "train", *shlex.split(f"{COMMON} {result.words} {result.runs[label]}"), "--out", str(folder)
    )
    return folder


def figures(name: str) -> dict[str, Any]:
    """What the folders of a result's runs record, as its JSON file has it."""
    result = RESULTS[name]
    rows: list[dict[str, Any]] = []
    losses: dict[str, list[float]] = {}
    for label, words in result.runs.items():
        folder = folder_of(name, label)
        run = RunRecord.read(folder)
        losses[label] = run.columns["loss"].tolist()
        reference = result.compared.get(label, label)
        apart = differences(losses[label], losses[reference])
        rows.append(
            {
                "label": label,
                "words": words,
                "compared_with": reference,
                "params": run.start["params"],
                "ranks": run.start["ranks"],
                "unit": run.unit,
                "steps": int(run.steps[-1]),
                "trained_on": int(run.trained_tokens[-1]),
                "last_loss": losses[label][-1],
                "evaluations": [list(each) for each in run.evaluations],
                "largest_difference": max(apart),
                "accuracy": accuracy(folder) if run.unit == "images" else None,
                "proof": [str(event["verdict"]) for event in run.proofs],
                "seconds": float(run.end["seconds"]),
                "curve": _points(run, losses[label]),
                "difference_curve": _points(run, apart),
            }
        )
    return {"name": name, "title": result.title, "words": result.words, "runs": rows}


def _points(run: RunRecord, values: list[float]) -> list[list[float]]:
    """A curve of few points: x and y, to six digits."""
    curve = downsampled(run.steps.astype(np.float64), np.array(values), most=MOST_POINTS)
    return [[float(f"{value:.6g}") for value in column.tolist()] for column in (curve.x, curve.y)]


@torch.no_grad()
def accuracy(folder: Path) -> float:
    """The share of the validation images that the saved model of a run classifies right, on one device."""
    run = load([str(folder / "run.toml")], FAMILIES)
    stored = open_checkpoint(find_checkpoint(str(folder)).path).section("model")
    images = read_pair(str(run.eval.source))
    labels = torch.tensor(images.labels).long()
    x = torch.tensor(images.images)
    batch = Batch(x, labels, positions=torch.zeros_like(labels))
    for name, block in FAMILIES[run.model.name].blocks(run.model).items():
        if name == "loss":
            break
        for parameter, value in block.named_parameters():
            value.copy_(stored.read(f"{name}.{parameter}", Box.whole(tuple(value.shape))))
        x = block(x, batch)
    return float((x.argmax(dim=1) == labels).double().mean())


def write(name: str) -> None:
    """Write the figures of a result and the page over its runs."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(figures(name), separators=(",", ":"))
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    folders = [folder_of(name, label) for label in RESULTS[name].runs]
    page = report_page([RunRecord.read(folder) for folder in folders])
    (FOLDER / f"{name}.html").write_text(page.replace(f"{Path.cwd()}/", ""), encoding="utf-8")


def main(names: list[str]) -> None:
    """Train, and write what docs/results.md shows."""
    unknown = [name for name in names if name not in RESULTS]
    if unknown:
        sys.exit(f"error: results: no such name (got {unknown[0]}; need {', '.join(RESULTS)})")
    for name in names or RESULTS:
        RESULTS[name].prepare()
        for label in RESULTS[name].runs:
            print(f"{name}: {label}", flush=True)
            train(name, label)
        write(name)
    write_page()


if __name__ == "__main__":
    main(sys.argv[1:])
