"""Classification and reward models equal a plain program with transformers' ForSequenceClassification, on any layout."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.data.chat_files import tokenizer_folder, write_jsonl
from tests.oracle.test_finetuning import FLOAT64, LR, OPTIM, STEPS, events_of, same, trained
from weft.checkpoint.folder import find_newest
from weft.checkpoint.read import open_checkpoint
from weft.cli import main
from weft.config.load import load
from weft.core.axes import Box
from weft.data.dataset import open_data
from weft.hf.export_hf import export_adapters, export_hf
from weft.hf.folder import HfFolder
from weft.models import FAMILIES
from weft.prove.against.float64 import widened
from weft.train.data_loader import samples_of

CLASSES = ("good", "bad", "neither")


@pytest.fixture(scope="module", autouse=True)
def norms_in_float64():
    """Let transformers' norms compute in float64, where they cast to float32."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", widened(LlamaRMSNorm.forward))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models as transformers saves them, with a tokenizer, and files of records."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    root = tmp_path_factory.mktemp("hf")
    for name, labels in (("classify", len(CLASSES)), ("reward", 1)):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=288,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            num_labels=labels,
        )
        LlamaForSequenceClassification(config).double().save_pretrained(root / name)
        tokenizer_folder(root / name)
    texts = []
    for index in range(24):
        text = f"the cat {'sat ' * (index % 5)}on a mat and said {'hello ' * (index % 3)}é"
        number = index % len(CLASSES)
        texts.append({"text": text, "label": CLASSES[number] if index % 2 else number})
    write_jsonl(root / "classify.jsonl", texts)
    pairs = []
    for index in range(16):
        prompt = [{"role": "user", "content": f"what is {'two ' * (index % 4)}plus five?"}]
        chosen = [{"role": "assistant", "content": "seven " * (1 + index % 3)}]
        rejected = [{"role": "assistant", "content": f"the cat {'sat ' * (index % 5)}é"}]
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    write_jsonl(root / "reward.jsonl", pairs)
    return root


def run_of(folder, out, name, words=""):
    data = f"--data.source {folder}/{name}.jsonl --data.tokenizer {folder}/{name}"
    classes = f"--data.classes {' '.join(CLASSES)}" if name == "classify" else ""
    sizes = f"--data.seq_len 128 --batch.global_size 4 --batch.micro_size 1 --steps {STEPS}"
    fixed = f"--model.from_hf {folder}/{name} --transport threads --data.prefetch 0 --out {out}"
    line = f"{fixed} {data} --loss {name} {classes} {sizes} {FLOAT64} {OPTIM} {words}"
    return load(shlex.split(line), FAMILIES)


def plain_losses(folder, tmp_path, name):
    """The losses of a plain loop: transformers' pooled scores of each text by itself, and AdamW."""
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    path = folder / name
    model = LlamaForSequenceClassification.from_pretrained(path, dtype=torch.float64)
    run = run_of(folder, tmp_path, name)
    samples = open_data(run.data, run.model)

    def score(tokens):
        return model(torch.tensor([tokens])).logits

    def classified(record):
        label = record["label"]
        number = CLASSES.index(label) if isinstance(label, str) else label
        tokens = tokenizer(record["text"])["input_ids"]
        return F.cross_entropy(score(tokens), torch.tensor([number]))

    def compared(record):
        """TRL's `RewardTrainer`: -logsigmoid(rewards_chosen - rewards_rejected)."""
        scores = [
            score(
                tokenizer.apply_chat_template(record["prompt"] + record[kind], return_dict=True)[
                    "input_ids"
                ]
            )
            for kind in ("chosen", "rejected")
        ]
        return -F.logsigmoid(scores[0] - scores[1]).squeeze()

    loss_of = classified if name == "classify" else compared
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0
    )
    losses = []
    for step in range(STEPS):
        chosen = samples_of(samples, step, global_size=4, seed=run.seed)
        numbers = np.concatenate([samples.table.rows[sample] for sample in chosen.tolist()])
        parts = [loss_of(records[number]) for number in numbers.tolist()]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), len(parts)))
    return losses


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    return {
        name: plain_losses(folder, tmp_path_factory.mktemp("out"), name)
        for name in ("classify", "reward")
    }


@pytest.mark.parametrize(
    "words",
    [
        "",
        '--mesh "dp2 tp2" --parallel.sequence True',
        "--mesh pp2",
        "--mesh cp2",
        "--mesh dp2 --parallel.zero 3",
        '--model.name hf:llama --mesh "tp2 pp2" --parallel.sequence True',
        "--model.name hf:llama --mesh cp2",
    ],
)
@pytest.mark.parametrize("name", ["classify", "reward"])
def test_scores_are_trained_as_with_transformers(folder, tmp_path, expected, name, words):
    assert expected[name][-1][0] < expected[name][0][0]
    same(trained(run_of(folder, tmp_path, name, words)), expected[name])


@pytest.mark.parametrize("name", ["classify", "reward"])
def test_accuracy_and_loss_of_an_evaluation_are_those_of_transformers(folder, tmp_path, name):
    """Under cp a text is on several ranks; the model is the exported one."""
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    out = tmp_path / "run"
    words = (
        f"--mesh cp2 --steps 1 --optim.lr 1e-6 --eval.every 1 --eval.source {folder}/{name}.jsonl"
    )
    event = events_of(run_of(folder, out, name, words), "eval")[-1]
    exported = tmp_path / "exported"
    newest = find_newest(out).path
    export_hf(
        newest, exported, dtype=None, max_shard_bytes=10**9, sidecar_folders=(), compares=False
    )
    model = LlamaForSequenceClassification.from_pretrained(exported, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    with torch.no_grad():
        scored = [scores_of(record, model, tokenizer) for record in records]
    rights = [float(scores.argmax() == number) for scores, number in scored]
    losses = [F.cross_entropy(scores, torch.tensor(number)).item() for scores, number in scored]
    assert 0 < event["accuracy"] < 1
    assert event["accuracy"] == pytest.approx(np.mean(rights), rel=1e-12)
    assert event["loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert event["tokens"] == len(records)
    assert "perplexity" not in event


@pytest.mark.parametrize("mesh", ["", "cp2", "dp2 tp2"])
@pytest.mark.parametrize("name", ["classify", "reward"])
def test_a_folder_of_transformers_is_evaluated_by_its_own_head(folder, tmp_path, capfd, name, mesh):
    """Its config says how many labels there are, and what they are called."""
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(folder / name, dtype=torch.float64)
    if name == "classify":
        model.config.id2label = dict(enumerate(CLASSES))
    model.save_pretrained(tmp_path / "model")
    tokenizer_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    with torch.no_grad():
        scored = [scores_of(record, model, tokenizer) for record in records]
    losses = [F.cross_entropy(scores, torch.tensor(number)).item() for scores, number in scored]
    words = ["--data", f"{folder}/{name}.jsonl", "--mesh", mesh, "--transport", "threads"]
    assert main(["eval", str(tmp_path / "model"), *words, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert found["accuracy"] == np.mean([scores.argmax() == number for scores, number in scored])


def scores_of(record, model, tokenizer):
    """The scores of a record, of which that with the returned number should be the largest; the
    cross entropy of two rewards is the loss of their pair.
    """
    if "label" in record:
        label = record["label"]
        number = CLASSES.index(label) if isinstance(label, str) else label
        ids = torch.tensor([tokenizer(record["text"])["input_ids"]])
        return model(ids).logits[0], number
    rewards = []
    for kind in ("chosen", "rejected"):
        messages = record["prompt"] + record[kind]
        ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        rewards.append(model(torch.tensor([ids])).logits[0, 0])
    return torch.stack(rewards), 0


def test_beside_adapters_the_head_is_trained_on_any_layout(folder, tmp_path):
    words = "--lora.rank 2"
    alone = trained(run_of(folder, tmp_path / "one", "classify", words))
    same(trained(run_of(folder, tmp_path / "two", "classify", f'{words} --mesh "dp2 tp2"')), alone)
    stored = open_checkpoint(find_newest(tmp_path / "two").path).section("model")
    name = "head.score.weight"
    found = stored.read(name, Box.whole(stored.shapes[name]))
    before = HfFolder(folder / "classify", run_of(folder, tmp_path / "none", "classify").model)
    assert not torch.equal(found, before.read(name, Box.whole(before.shapes[name])))
    export_adapters(find_newest(tmp_path / "two").path, tmp_path / "adapters", base=None)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    tensors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert torch.equal(tensors["base_model.model.score.weight"], found)


def test_an_exported_model_scores_as_in_transformers(folder, tmp_path):
    """Its classes are named, and the folder is read again."""
    trained(run_of(folder, tmp_path / "run", "classify", "--steps 1"))
    newest = find_newest(tmp_path / "run").path
    out = tmp_path / "exported"
    result = export_hf(
        newest, out, dtype=None, max_shard_bytes=10**9, sidecar_folders=(), compares=True
    )
    assert result.is_equal, result.lines
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert list(config["id2label"].values()) == list(CLASSES)
    again = load(
        shlex.split(f"--model.from_hf {out} --loss classify --data.classes {' '.join(CLASSES)}"),
        FAMILIES,
    )
    assert again.model.labels == len(CLASSES)


def test_a_language_model_gets_a_new_head(folder, tmp_path):
    """Scores of a folder without a head for labels are drawn, and its own head is not read."""
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder / "classify", dtype=torch.float64)
    base.save_pretrained(tmp_path / "lm")
    tokenizer_folder(tmp_path / "lm")
    run = run_of(folder, tmp_path / "run", "classify", "--steps 1 --mesh tp2")
    run = run.with_values({"model.from_hf": str(tmp_path / "lm")})
    ((loss, num_texts),) = trained(run)
    assert num_texts >= 4
    assert abs(loss - np.log(len(CLASSES))) < 1
