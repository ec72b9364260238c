"""Every command of README and docs runs as printed, in the order of the page, and succeeds."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.data.chat_files import conversations, write_jsonl
from tests.docs.commands import Command, CommandServer, commands_of

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/checkpoints.md",
    "docs/choose-layout.md",
    "docs/clusters.md",
    "docs/data.md",
    "docs/devices.md",
    "docs/faults.md",
    "docs/finetuning.md",
    "docs/gallery.md",
    "docs/generate.md",
    "docs/hardware.md",
    "docs/huggingface.md",
    "docs/index.md",
    "docs/lora.md",
    "docs/optimizers.md",
    "docs/plan.md",
    "docs/precision.md",
    "docs/proof-tests.md",
    "docs/proofs.md",
    "docs/runs.md",
    "docs/schedules.md",
    "docs/sites.md",
    "docs/start.md",
    "docs/sweeps.md",
    "docs/tensor_parallel.md",
    "docs/trace.md",
]
SLOW_PAGES = {
    "docs/checkpoints.md",
    "docs/choose-layout.md",
    "docs/clusters.md",
    "docs/data.md",
    "docs/devices.md",
    "docs/faults.md",
    "docs/finetuning.md",
    "docs/gallery.md",
    "docs/generate.md",
    "docs/hardware.md",
    "docs/huggingface.md",
    "docs/index.md",
    "docs/lora.md",
    "docs/optimizers.md",
    "docs/plan.md",
    "docs/precision.md",
    "docs/proof-tests.md",
    "docs/proofs.md",
    "docs/runs.md",
    "docs/schedules.md",
    "docs/sites.md",
    "docs/start.md",
    "docs/sweeps.md",
    "docs/tensor_parallel.md",
    "docs/trace.md",
}
"""Other tests run the same commands with other flags; `make slow` runs these pages."""
SLOW_COMMANDS = (
    "weft train runs/first/run.toml ",
    'weft train --mesh "dp2 cp2" ',
    "weft train --model.name deepseek ",
    "weft train --mesh dp4 --out runs/x ",
    'weft train --mesh "pp2 tp2" --out runs/x ',
    'weft train --mesh "dp2 tp2" --data.source prepared ',
    "weft train --model.from_hf Llama-3.2-1B --data.source for-llama --mesh ",
    "weft prove runs/first ",
)
"""Runs of README.md whose layouts, resumes and data other tests train with smaller models, and the
proof of a finished run, which `make train` ends with; no later command of the page reads what they
write. `make slow` runs them.
"""
NOT_RUN = ("make", "pip", "python")
"""make builds the environment of these tests, pip installs, python runs examples, which
tests/examples runs.
"""
NUM_TEXTS, TEXT_CHARS = 8, 3000
TEXT = "The quick brown fox jumps over the lazy dog.\nWeaving threads of many colours, one after another.\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    server = CommandServer()
    yield server
    server.close()


SAVE_LLAMA = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def hugging_face_folder(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A small LLaMA as transformers saves it, with a tokenizer.json."""
    from weft.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("hf") / "model"
    result = server.run_code(SAVE_LLAMA, str(folder))
    assert result.code == 0, result.text
    text = [TEXT, *source_texts()]
    (folder / "tokenizer.json").write_text(train_bpe(text, vocab=320), encoding="utf-8")
    return folder


def source_texts() -> list[str]:
    """The beginnings of some sources: enough to train on."""
    paths = sorted((ROOT / "src" / "weft" / "core").glob("*.py"))
    return [path.read_text(encoding="utf-8")[:TEXT_CHARS] for path in paths[:NUM_TEXTS]]


@pytest.fixture
def folder(tmp_path: Path, hugging_face_folder: Path) -> Path:
    """What the pages assume that a reader has: texts, records, and a model from Hugging Face."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, text in enumerate(source_texts()):
        (texts / f"{number:02}.txt").write_text(text + TEXT, encoding="utf-8")
    shutil.copytree(hugging_face_folder, tmp_path / "Llama-3.2-1B")
    write_jsonl(tmp_path / "chat.jsonl", conversations(12))
    pairs = [
        {"prompt": f"{number} and {number} are", "chosen": f" {2 * number}", "rejected": " many"}
        for number in range(8)
    ]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    answers = [
        {"prompt": f"{number} and {number} are", "completion": f" {n}", "label": n == 2 * number}
        for number in range(8)
        for n in (number, 2 * number)
    ]
    write_jsonl(tmp_path / "answers.jsonl", answers)
    words = ("negative", "positive")
    reviews = [{"text": f"a {words[n % 2]} film, {n}", "label": words[n % 2]} for n in range(8)]
    write_jsonl(tmp_path / "reviews.jsonl", reviews)
    (tmp_path / "questions.txt").write_text("hello\n/save talk.jsonl\n", encoding="utf-8")
    (tmp_path / "main.py").write_text("def main():\n    print(1)\n", encoding="utf-8")
    return tmp_path


@functools.cache
def has_slurm() -> bool:
    """Whether a Slurm controller answers."""
    if shutil.which("sinfo") is None:
        return False
    return subprocess.run(["sinfo"], capture_output=True, check=False, timeout=60).returncode == 0


def is_run(command: Command) -> bool:
    if command.program == "srun":
        return has_slurm()
    return command.program not in NOT_RUN


def marked(pages: Sequence[str]) -> list[object]:
    """The pages, some of them for `make slow` only."""
    slow = pytest.mark.slow
    return [pytest.param(page, marks=slow if page in SLOW_PAGES else ()) for page in pages]


def run_page(commands: Sequence[Command], folder: Path, server: CommandServer) -> None:
    assert commands
    for command in commands:
        result = server.run(command, folder)
        assert result.code == 0, f"{command.text}\n{result.text}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", marked(PAGES))
def test_commands_of_a_page_run_in_order(page: str, folder: Path, server: CommandServer) -> None:
    """Without those of torchrun, whose ranks import torch again, and those for `make slow`."""
    commands = [command for command in commands_of(ROOT / page) if is_run(command)]
    commands = [command for command in commands if command.program != "torchrun"]
    run_page([c for c in commands if not c.text.startswith(SLOW_COMMANDS)], folder, server)


def test_commands_for_make_slow_are_those_of_the_page() -> None:
    texts = [command.text for command in commands_of(ROOT / "README.md")]
    for beginning in SLOW_COMMANDS:
        assert sum(text.startswith(beginning) for text in texts) == 1, beginning


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", ["README.md", "docs/faults.md", "docs/generate.md"])
def test_commands_of_a_page_run_in_order_with_torchrun(
    page: str, folder: Path, server: CommandServer
) -> None:
    commands = [command for command in commands_of(ROOT / page) if is_run(command)]
    assert any(command.program == "torchrun" for command in commands)
    run_page(commands, folder, server)


def test_every_page_with_commands_is_run() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    with_commands = set()
    for page in pages:
        if page.name != "LOG.md" and any(is_run(command) for command in commands_of(page)):
            with_commands.add(str(page.relative_to(ROOT)))
    assert with_commands - {"docs/extend.md"} == set(PAGES)  # extend.md has a test of its own


def test_make_targets_in_pages_exist() -> None:
    targets = set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ):
        for command in commands_of(page):
            if command.program == "make":
                assert command.words[1] in targets, f"{page.name}: {command.text}"


def recipe_of_train() -> list[str]:
    """The lines that `make train` runs, without their output."""
    options = ("OUT=runs/train", "ARGS=--steps 2", "MESH=pp2 tp2")
    arguments = ["make", "--dry-run", "train", *options]
    recipe = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    return recipe.stdout.splitlines()


def run_shortened(
    lines: Sequence[str], folder: Path, server: CommandServer, *, flag: str, value: str
) -> None:
    """Run commands of weft, those that have the flag with a smaller value."""
    for line in lines:
        words = shlex.split(line)
        if flag in words:
            words[words.index(flag) + 1] = value
        result = server.run(Command(line, tuple(words)), folder)
        assert result.code == 0, f"{line}\n{result.text}"


def test_make_train_runs_commands_that_work(server: CommandServer, tmp_path: Path) -> None:
    lines = [line for line in recipe_of_train() if line.startswith(".venv/bin/weft ")]
    assert len(lines) == 2
    run_shortened(lines, tmp_path, server, flag="--sample", value="8")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_make_train_says_to_try_next_runs_after_it(
    server: CommandServer, tmp_path: Path
) -> None:
    lines = recipe_of_train()
    train = next(line for line in lines if line.startswith(".venv/bin/weft train "))
    run_shortened([train], tmp_path, server, flag="--sample", value="8")
    printed = [shlex.split(line)[-1].strip() for line in lines if line.startswith("echo ")]
    following = [text for text in printed if text.startswith(".venv/bin/weft ")]
    assert len(following) == 6
    run_shortened(following, tmp_path, server, flag="--steps", value="4")
