"""Every command that weft prints runs, as printed, in the state in which it is printed."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.data.chat_files import conversations, write_jsonl
from tests.input.folders import write_base
from tests.input.printed_commands import HOLE, commands_in, pattern_of, runnable, templates
from weft.cli import main
from weft.data import record_sources, token_sources
from weft.data.token_sources import MAX_CHARS_IN_MEMORY
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER

PLACES = {
    "INPUT": "text.txt",
    "FOLDER": "prep",
    "FILE": "tokenizer.json",
    "TEXT": "some",
    "TEXTS": "words.txt",
    "NEW.toml": "new.toml",
}
"""What a reader puts in place of the words in capitals."""
TOKENIZER = (
    '{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, '
    '"post_processor": null, "decoder": null, '
    '"model": {"type": "WordLevel", "vocab": {"some": 0, "text": 1, "?": 2}, "unk_token": "?"}}'
)
MODEL = """
from dataclasses import dataclass
import torch

@dataclass(frozen=True)
class Config:
    vocab: int = 256
    dim: int = 16

def blocks(config):
    embed, head = torch.nn.Embedding(config.vocab, config.dim), torch.nn.Linear(config.dim, config.vocab)
    return {"embed": embed, "head": head}
"""
FIGURE = '{value = 1.0, published = "a data sheet"}'
NO_LINK = f"""
label = "an island"
node = 4
memory_gb = {FIGURE}
fp32_tflops = {FIGURE}
bf16_tflops = {FIGURE}
hbm_tb_s = {FIGURE}
"""
DATED = "{{ strftime_now('%Y') }}{% for message in messages %}{{ message.content }}{% endfor %}"
TINY = "--model.layers 1 --model.dim 32 --data.seq_len 16 --batch.global_size 4 --transport threads"
WRAPPED = re.compile(r"\n {8,}")
SLOW = re.compile(
    r"^(train|explain|axes|bench|chat|doctor|eval|export|generate|import|prove|plan|sweep)\b"
)
"""Commands that import torch."""


INIT = "commands/test_init.py::test_the_commands_of_a_file_run"
PAGES = "docs/test_commands.py::test_commands_of_a_page_run_in_order"
DASH = "commands/test_dash.py::test_ctrl_c_ends_streams_at_once_with_code_0"
RUN_ELSEWHERE = {
    "weft export {} {} --format gguf": "hf/test_gguf.py::test_the_fix_of_a_file_name_is_a_command",
    "weft dash FOLDER, or start a run: weft train --steps 20": DASH,  # it serves until Ctrl-C
    "# A flag overrides a key of this file: weft train {} --optim.lr 1e-3": INIT,
    "  weft explain {}": INIT,
    "  weft train {}": INIT,
    "  weft bench compute  matrix products, attention, memory, launches": PAGES,
    "correct the file, or write another: weft bench compute --write NEW.toml": PAGES,
    "weft bench compute --write gpu.toml, then --hardware gpu.toml; or name a mesh": PAGES,
    "weft bench compute --write {}": PAGES,
    'weft bench compute --write {}, or {} = {value = 1.0, published = "where it stands"}': PAGES,
    "weft bench comm --mesh dp2 --write {}": PAGES,
    "weft plan --calibrate --write {}": PAGES,
}
"""Benchmarks of a minute and more, which a page of the documentation has, word by word."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the examples in messages name: runs, texts, a model file, a Hugging Face folder."""
    write_base(tmp_path)
    shutil.copytree(tmp_path / "run", tmp_path / "runs" / "first")
    shutil.copytree(tmp_path / "hf", tmp_path / "Qwen3-0.6B")
    (tmp_path / "texts").mkdir()
    shutil.copy(tmp_path / "text.txt", tmp_path / "texts")
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "words.txt").write_text("some text" + " some text" * 300)
    (tmp_path / "my_model.py").write_text(MODEL)
    write_jsonl(tmp_path / "chat.jsonl", conversations(12))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # no cluster takes a job
    monkeypatch.setenv("WEFT_PROVE_BEFORE", "never")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    return tmp_path


def marked(template: str) -> object:
    """A template, for `make slow` where a command of it imports torch."""
    is_slow = any(map(SLOW.match, commands_in(template)))
    return pytest.param(template, marks=pytest.mark.slow if is_slow else ())


def run_all(message: str) -> None:
    """Run the commands of a message, in order."""
    found = tuple(commands_in(message))
    assert found
    for command in found:
        words = runnable(command, PLACES)
        assert main(words) == EXIT_OK, shlex.join(words)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "template",
    [marked(each) for each in templates() if HOLE not in each and each not in RUN_ELSEWHERE],
)
@pytest.mark.usefixtures("folder")
def test_a_command_without_values_runs(template: str) -> None:
    run_all(template)


# -- commands with values ----------------------------------------------------------------------


def nothing(_folder: Path) -> None:
    pass


@dataclass(frozen=True)
class State:
    """A command that prints another one.

    Attributes:
        change: what is done to the folder before.
        max_chars: of a text that is tokenized at a start.
        is_slow: whether it imports torch.
    """

    words: str
    change: Callable[[Path], object] = nothing
    code: int = EXIT_USER
    max_chars: int = MAX_CHARS_IN_MEMORY
    is_slow: bool = True


def island(folder: Path) -> None:
    (folder / "island.toml").write_text(NO_LINK)


def prepare_words(folder: Path) -> None:
    words = ["data", "prepare", "words.txt", "--out", "words", "--tokenizer", "tokenizer.json"]
    assert main([*words, "--valid", "0"]) == EXIT_OK


def sites(folder: Path) -> None:
    run = f"train --mesh site2 --steps 2 --site.every 2 --out sites {TINY}"
    assert main(run.split()) == EXIT_OK


def one_step(folder: Path) -> None:
    """A sound checkpoint, after which a rate of 1e30 makes a later step not finite."""
    run = f"train --steps 1 --out bad --optim.warmup 0 --save.every 1 --save.keep 9 {TINY}"
    assert main(run.split()) == EXIT_OK


NOT_FINITE = State(
    "train bad/run.toml --resume auto --steps 4 --optim.lr 1e30", change=one_step, code=EXIT_FAILED
)
STATES = {
    "weft train {}": State(f"--steps 1 {TINY}", is_slow=False),
    "weft train {} --resume auto": State("import hf --out imported --compare False", code=EXIT_OK),
    "train on it: weft train --data.source {}{}{}{}": State(
        "data prepare text.txt --out made", code=EXIT_OK
    ),
    "{} gets no {}: weft generate {} --prompt TEXT --tokenizer {}": State(
        "export run exported --compare False", code=EXIT_OK
    ),
    "weft schedule {} --compare": State("schedule 1f1b gpipe", is_slow=False),
    "weft axes {}, which proposes it": State("train my_model.py --mesh tp2"),
    "weft explain --hardware {}": State(
        "bench comm --write island.toml --largest 1KB --seconds 0.0001", change=island, code=EXIT_OK
    ),
    "weft bench comm --write {}, or a layout of fewer ranks": State(
        "explain --mesh dp2 --hardware island.toml", change=island
    ),
    "weft data prepare {}{} --out FOLDER, then --{} FOLDER": State(
        "train --data.source words.txt --data.tokenizer tokenizer.json", max_chars=9, is_slow=False
    ),
    "weft data prepare INPUT --out FOLDER --tokenizer {}, then --{} FOLDER": State(
        "train --eval.every 2 --eval.source words", change=prepare_words, is_slow=False
    ),
    "weft data prepare INPUT --out FOLDER --tokenizer {}": State(
        "train --model.from_hf hf --data.source text.txt --data.tokenizer bytes",
        change=lambda folder: shutil.copy(folder / "tokenizer.json", folder / "hf"),
    ),
    "weft data prepare INPUT --out FOLDER --tokenizer {}, in place of {}": State(
        "train --data.mix prep=1 words=1", change=prepare_words, is_slow=False
    ),
    "weft prove {}, which compares the algorithm": State("prove sites", change=sites),
    "ready: runs train here on {}; try weft train --mesh dp2 --steps 20": State(
        "doctor", code=EXIT_OK
    ),
    "{}; see weft trace {}": State(
        f"train --steps 3 --profile 2:4 --out 'a run' {TINY}", code=EXIT_OK
    ),
    "weft report {}": State(f"train --steps 1 --out 'a run' {TINY}", code=EXIT_OK),
    "weft generate {} --prompt 'def ' --tokens 40": State(
        f"train --steps 1 --out 'a run' {TINY}", code=EXIT_OK
    ),
    "weft chat {}": State(
        "train --data.source chat.jsonl --data.format chat --data.chat_template chatml --steps 1 "
        f"--out 'a run' {TINY} --data.seq_len 256",
        code=EXIT_OK,
    ),
    "the two best: weft compare {}": State(
        f"sweep --seed 1 2 --steps 1 --out swept {TINY}", code=EXIT_OK
    ),
    "weft prove {}": State("prove run", code=EXIT_FAILED),
    "weft prove --full --first {} {}": State("prove --mesh dp2 --json", code=EXIT_OK),
    "weft replay {} --step {}": NOT_FINITE,
    "{}. Resume from {} with a lower --optim.lr: weft train {} --resume {} {}": NOT_FINITE,
    "{}. Start again with a lower --optim.lr: weft train {} --out {} {}": State(
        f"train --steps 3 --out bad --optim.lr 1e30 --optim.warmup 0 {TINY}", code=EXIT_FAILED
    ),
}
"""Template -> the state in which it is printed."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(template, marks=pytest.mark.slow if state.is_slow else ())
        for template, state in STATES.items()
    ],
)
def test_a_command_runs_in_the_state_in_which_it_is_printed(
    template: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = STATES[template]
    state.change(folder)
    capfd.readouterr()
    with monkeypatch.context() as context:
        for module in (record_sources, token_sources):
            context.setattr(module, "MAX_CHARS_IN_MEMORY", state.max_chars)
        assert main(shlex.split(state.words)) == state.code
    out, err = capfd.readouterr()
    lines = WRAPPED.sub(" ", out + err).splitlines()
    if out.startswith("{"):
        lines = [json.loads(out)["command"]]
    (message,) = filter(pattern_of(template).search, lines)
    run_all(message)


@pytest.mark.parametrize(
    "words",
    [
        "--data.source chat.jsonl --data.format auto --data.chat_template chatml",
        "--data.source chat.jsonl --data.format chat --data.chat_template dated.jinja",
        "--data.source texts --data.tokenizer tokenizer.json --data.round_trip any",
    ],
)
def test_what_is_too_large_or_dated_is_prepared_as_the_run_reads_it(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "dated.jinja").write_text(DATED)
    with monkeypatch.context() as context:
        for module in (record_sources, token_sources):
            context.setattr(module, "MAX_CHARS_IN_MEMORY", 9)
        assert main(["train", *words.split()]) == EXIT_USER
    run_all(capsys.readouterr().err)


def test_every_printed_command_has_a_state_or_a_test() -> None:
    with_values = {template for template in templates() if HOLE in template}
    assert with_values - {*RUN_ELSEWHERE} == {*STATES}
    assert {*RUN_ELSEWHERE} <= {*templates()}
    root = Path(__file__).parents[1]
    for place in RUN_ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (root / file).read_text()
