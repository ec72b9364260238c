"""The texts that a run generates equal those of the plain model, and do not change its training, for every layout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from torch import nn

from tests.generate.models import (
    CONFIGS,
    DRAWN,
    SEED,
    Generation,
    config_of,
    plain,
    plan_of,
    stored,
)
from tests.tiny_run import SEQUENCES, write_text
from weft.cli import main
from weft.comm.comm import Comm
from weft.errors import EXIT_OK
from weft.generate.cache import restored_modules
from weft.generate.decode import Decoder
from weft.models import FAMILIES
from weft.models.common.head_output import LOGITS, heads_of
from weft.report.page import report_page
from weft.report.recorded_values import RunRecord
from weft.testing import run_ranks
from weft.train.build import build_model

LAYOUTS = [
    ("deepseek", "pp2 ep2", {}),
    ("llama3", "cp2 tp2", {"context": "ring"}),
    ("gpt2", "cp2 tp2", {"context": "allgather", "sequence_parallel": True}),
    ("llama3", "pp2 cp2", {"context": "ulysses"}),
    ("gpt2", "dp2 tp2", {"zero": 1, "sequence_parallel": True}),
    ("llama3", "dp2", {"recompute": "full"}),
    ("llama3", "pp2 tp2", {"chunked_losses": True}),
]


def words_of(value: object) -> str | None:
    """Options in the name of a row: an index would change with the number of families."""
    return " ".join(map(str, value.values())) if isinstance(value, dict) else None


@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [*((family, "", {}) for family in CONFIGS), *LAYOUTS],
    ids=words_of,
)
def test_a_model_on_its_training_layout_generates_the_plain_models_text(family, mesh, options):
    config = config_of(family)
    source = stored(config, plain(config))
    plan = plan_of(config, mesh).model_copy(update={"seq_len": 8, **options})
    generation = Generation(prompts=((4, 9, 2),), num_tokens=12, sampling=DRAWN)
    texts, _ = generation.reference(config)

    def rank(comm: Comm) -> list[list[int]]:
        model = build_model(FAMILIES[family], config, plan, comm, seed=SEED, source=source)
        decoder = Decoder(
            model,
            vocab=config.axis_sizes()["vocab"],
            max_positions=getattr(config, "max_seq_len", None),
        )
        generated, _ = generation(decoder)
        return generated

    assert run_ranks(mesh, rank) == [texts] * plan.mesh.size


def test_weft_train_samples_at_its_end_the_same_text_on_every_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = [
        "--model.layers",
        "2",
        "--model.dim",
        "32",
        "--data.seq_len",
        "16",
        "--transport",
        "threads",
    ]
    words += [
        "--batch.global_size",
        "2",
        "--batch.micro_size",
        "1",
        "--steps",
        "2",
        "--sample",
        "20",
    ]
    for kind in ("params", "compute", "reduce"):
        words += [f"--precision.{kind}", "float64"]
    texts = set()
    for mesh, logits in (("", "whole"), ("cp2", "whole"), ("dp2 tp2", "chunked")):
        out = tmp_path / f"run {mesh}"
        options = ["--mesh", mesh, "--parallel.logits", logits, "--out", str(out)]
        assert main(["train", *words, *options]) == EXIT_OK, capsys.readouterr().err
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        (event,) = [event for event in events if event["event"] == "sample"]
        assert event["prompt"] == "def "
        texts.add(event["text"])
    assert len(texts) == 1


def numbers_of_run(out: Path) -> list[tuple[object, ...]]:
    """What must not change of the steps and evaluations of a run: all but times and memory."""
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    keys = ("event", "step", "loss", "grad_norm", "lr", "tokens", "expert_load")
    kinds = ("step", "eval")
    return [tuple(event.get(key) for key in keys) for event in events if event["event"] in kinds]


def digests_of_run(out: Path, step: int) -> dict[str, str]:
    """SHA-256 of each file of tensors of a checkpoint."""
    files = sorted((out / "ckpt" / f"step-{step:06d}").glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


RUNS = {
    "dp2": ("--mesh", "dp2", "--parallel.zero", "1"),
    "pp2": ("--mesh", "pp2"),
    "ZeRO 3": ("--mesh", "dp2", "--parallel.zero", "3"),
    "cp2 tp2 with ring attention": ("--mesh", "cp2 tp2", "--parallel.sequence", "True"),
    "dropout, recomputed": (
        *("--mesh", "dp2", "--model.name", "gpt2", "--model.dropout", "0.5"),
        *("--parallel.recompute", "full"),
    ),
    "experts": ("--mesh", "ep2", "--model.name", "deepseek"),
    "adapters": ("--mesh", "pp2", "--lora.rank", "2", "--lora.dropout", "0.5"),
}


@pytest.mark.parametrize("name", RUNS)
def test_texts_between_steps_do_not_change_the_training_by_a_bit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path)
    words = ["--model.layers", "2", "--model.dim", "16", "--model.heads", "2", *SEQUENCES]
    words += ["--data.source", str(text), "--transport", "threads", "--batch.global_size", "4"]
    words += ["--steps", "6", "--eval.every", "3", "--eval.source", str(text)]
    words += ["--eval.batches", "1", *RUNS[name]]
    sampled = ["--sample", "12", "--sample_every", "2"]
    for out, more in (("plain", []), ("sampled", sampled)):
        code = main(["train", *words, *more, "--out", str(tmp_path / out)])
        assert code == EXIT_OK, capsys.readouterr().err
    assert len(numbers_of_run(tmp_path / "plain")) == 8
    assert numbers_of_run(tmp_path / "sampled") == numbers_of_run(tmp_path / "plain")
    assert digests_of_run(tmp_path / "plain", 6)
    assert digests_of_run(tmp_path / "sampled", 6) == digests_of_run(tmp_path / "plain", 6)
    (run,) = [RunRecord.read(tmp_path / "sampled")]
    assert [event["step"] for event in run.samples] == [2, 4, 6]
    assert all(len(event["text"].encode()) >= 4 for event in run.samples)
    shown = capsys.readouterr().out
    assert shown.index("sample of step 2") < shown.index("sample of step 4")
    page = report_page([run])
    assert all(f'<p class="note">step {step}</p>' in page for step in (2, 4, 6))


def test_an_error_while_a_text_is_generated_leaves_the_model_as_it_was() -> None:
    config = config_of("llama3")

    def rank(comm: Comm) -> bool:
        plan = plan_of(config, "").model_copy(update={"chunked_losses": True})
        model = build_model(FAMILIES["llama3"], config, plan, comm, seed=SEED)
        (stage,) = model.stages.values()
        modules = dict(all_modules(stage))
        implementations = implementations_of(modules)
        (head,) = heads_of(stage)
        losses = head.head_output

        def fail() -> None:
            with restored_modules(model.stages):
                Decoder(model, vocab=config.axis_sizes()["vocab"])
                assert head.head_output is LOGITS
                assert implementations_of(modules) != implementations
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        is_restored = implementations_of(modules) == implementations
        is_restored = is_restored and head.head_output is losses is not LOGITS
        return dict(all_modules(stage)) == modules and is_restored

    assert run_ranks("", rank) == [True]


def implementations_of(modules: dict[str, nn.Module]) -> list[object]:
    """How each attention is computed."""
    return [vars(module).get("implementation") for module in modules.values()]


def all_modules(stage: nn.ModuleDict) -> list[tuple[str, nn.Module]]:
    """Path and module, also of modules that have several paths."""
    return list(stage.named_modules(remove_duplicate=False))
