"""Fine-tuning on conversations and preference pairs equals a plain program with transformers, on one device and many."""

from __future__ import annotations

import copy
import json
import os
import shlex
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.data.chat_files import conversations, tokenizer_folder, write_jsonl
from weft.checkpoint.resume import resume_faults
from weft.comm.comm import Comm
from weft.config.load import load
from weft.data.dataset import open_data
from weft.data.logprob_files import FOLDER, read_references
from weft.errors import DataError
from weft.models import FAMILIES
from weft.prove.against.float64 import widened
from weft.testing import run_ranks
from weft.train.build_training import build_training
from weft.train.data_loader import samples_of
from weft.train.event_log import EventLog
from weft.train.kl_estimate import KlEstimate
from weft.train.loop import run_training

STEPS = 5
LR = 1e-2
BETA = 0.3
TOLERANCE = 1e-9
FLOAT64 = "--precision.params float64 --precision.compute float64 --precision.reduce float64"
OPTIM = (
    f"--optim.lr {LR} --optim.decay constant --optim.warmup 0 --optim.weight_decay 0 --optim.clip 0"
)


@pytest.fixture(scope="module", autouse=True)
def norms_in_float64():
    """Let transformers' norms compute in float64, where they cast to float32."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", widened(LlamaRMSNorm.forward))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LLaMA of two layers as transformers saves it, with a tokenizer and a template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("hf") / "model"
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
    )
    LlamaForCausalLM(config).double().save_pretrained(folder)
    tokenizer_folder(folder)
    write_jsonl(folder / "chat.jsonl", conversations(24))
    pairs = []
    for index in range(16):
        prompt = [{"role": "user", "content": f"what is {'two ' * (index % 4)}plus five?"}]
        chosen = [{"role": "assistant", "content": "seven " * (1 + index % 3)}]
        rejected = [{"role": "assistant", "content": f"the cat {'sat ' * (index % 5)}é"}]
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    write_jsonl(folder / "pairs.jsonl", pairs)
    return folder


def run_of(folder, out, name, words=""):
    data = f"--data.source {folder}/{name}.jsonl --data.format auto --data.tokenizer {folder}"
    loss = f"--loss dpo --dpo.beta {BETA}" if name == "pairs" else ""
    sizes = f"--data.seq_len 128 --batch.global_size 4 --batch.micro_size 1 --steps {STEPS}"
    fixed = f"--model.from_hf {folder} --transport threads --data.prefetch 0 --out {out}"
    line = f"{fixed} {data} {loss} {sizes} {FLOAT64} {OPTIM} {words}"
    return load(shlex.split(line), FAMILIES)


def trained(run):
    """The losses of a run's steps."""
    return [(event["loss"], event["tokens"]) for event in events_of(run, "step")]


def events_of(run, kind):
    """The events of one kind of a run, on rank 0."""
    os.makedirs(run.out, exist_ok=True)

    def rank(comm: Comm):
        training = build_training(run, comm, stop_requested=lambda: False)
        with EventLog(None) as log:
            events = []
            log.emit = events.append
            run_training(training, log)
        return [event for event in events if event["event"] == kind]

    return run_ranks(run.device_mesh, rank, timeout_s=200)[0]


def sum_of_logprobs(model, tokens, mask):
    """Sum over the answer's tokens of their log-probabilities, of one text by itself."""
    ids = torch.tensor([tokens])
    logits = model(ids).logits[0, :-1]
    targets = ids[0, 1:]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    return (chosen * torch.tensor(mask[1:])).sum()


def plain(folder, run, loss_of_record):
    """The losses of a plain loop over the same records: AdamW on one device, each text by itself."""
    from transformers import LlamaForCausalLM

    samples = open_data(run.data, run.model)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    first = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0
    )
    losses = []
    for step in range(STEPS):
        chosen = samples_of(samples, step, global_size=4, seed=run.seed)
        rows = [samples.table.rows[sample] for sample in chosen.tolist()]
        records = np.concatenate(rows)
        parts = [loss_of_record(model, first, record) for record in records.tolist()]
        count = sum(part[1] for part in parts)
        loss = sum(part[0] for part in parts) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), count))
    return losses


def same(found, expected):
    actual = [tokens for _, tokens in found]
    assert actual == [tokens for _, tokens in expected]
    for (loss, _), (other, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other, rel=TOLERANCE)


@pytest.fixture(scope="module")
def chat_losses(folder, tmp_path_factory):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (folder / "chat.jsonl").read_text().splitlines()
    records = [json.loads(line)["messages"] for line in lines]

    def loss(model, _first, number):
        """As TRL with assistant_only_loss: labels are the ids where the mask is 1, else -100."""
        encoded = tokenizer.apply_chat_template(
            records[number], return_dict=True, return_assistant_tokens_mask=True
        )
        tokens = encoded["input_ids"]
        mask = encoded["assistant_masks"]
        labels = []
        for token, counts in zip(tokens, mask, strict=True):
            labels.append(token if counts else -100)
        logits = model(torch.tensor([tokens])).logits[0, :-1]
        total = F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
        return total, sum(mask[1:])

    run = run_of(folder, tmp_path_factory.mktemp("out"), "chat")
    return plain(folder, run, loss)


def pair_losses_of(folder, out, loss_of_pair, *, with_reference):
    """The losses of a plain loop over pairs; a function of (sum, reference sum, number) of answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]

    def text(pair, name):
        prompt = tokenizer.apply_chat_template(
            pair["prompt"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        whole = tokenizer.apply_chat_template(pair["prompt"] + pair[name], return_dict=True)
        tokens = whole["input_ids"]
        num_answer = len(tokens) - len(prompt)
        return tokens, [0] * len(prompt) + [1] * num_answer

    def loss(model, first, number):
        answers = []
        for name in ("chosen", "rejected"):
            tokens, mask = text(pairs[number], name)
            reference = 0.0
            if with_reference:
                with torch.no_grad():
                    reference = sum_of_logprobs(first, tokens, mask)
            answers.append((sum_of_logprobs(model, tokens, mask), reference, sum(mask[1:])))
        return loss_of_pair(*answers), 1

    return plain(folder, run_of(folder, out, "pairs"), loss)


def dpo(chosen, rejected, flipped=0.0):
    margin = BETA * (chosen[0] - chosen[1] - (rejected[0] - rejected[1]))
    return (1 - flipped) * F.softplus(-margin) + flipped * F.softplus(margin)


def hinge(chosen, rejected):
    return (1 - BETA * (chosen[0] - chosen[1] - rejected[0] + rejected[1])).clamp(min=0)


def ipo(chosen, rejected):
    means = [(sums - reference) / num for sums, reference, num in (chosen, rejected)]
    return (means[0] - means[1] - 1 / (2 * BETA)) ** 2


def simpo(chosen, rejected):
    return F.softplus(0.7 - 2 * (chosen[0] / chosen[2] - rejected[0] / rejected[2]))


def orpo(chosen, rejected):
    p, other = (torch.exp(sums / num) for sums, _, num in (chosen, rejected))
    return -torch.log(p) - BETA * F.logsigmoid(torch.log(p / (1 - p) * (1 - other) / other))


OTHER_LOSSES = {
    "sigmoid": (partial(dpo, flipped=0.2), "--dpo.label_smoothing 0.2"),
    "hinge": (hinge, ""),
    "ipo": (ipo, ""),
    "simpo": (simpo, "--dpo.beta 2 --dpo.gamma 0.7"),
    "orpo": (orpo, ""),
}


@pytest.fixture(scope="module")
def dpo_losses(folder, tmp_path_factory):
    return pair_losses_of(folder, tmp_path_factory.mktemp("out"), dpo, with_reference=True)


@pytest.fixture(scope="module")
def other_losses(folder, tmp_path_factory):
    """Losses of a plain program by the name of the loss, computed once."""

    @cache
    def losses(name):
        with_reference = name not in ("simpo", "orpo")
        out = tmp_path_factory.mktemp("out")
        return pair_losses_of(folder, out, OTHER_LOSSES[name][0], with_reference=with_reference)

    return losses


@pytest.mark.parametrize("words", ["", '--mesh "dp2 tp2"', "--mesh cp2"])
def test_conversations_are_trained_on_as_transformers_with_trl_masks(
    folder, tmp_path, chat_losses, words
):
    run = run_of(folder, tmp_path, "chat", words)
    same(trained(run), chat_losses)


@pytest.mark.parametrize(
    "words",
    [
        "",
        '--mesh "dp2 tp2"',
        '--mesh "pp2 dp2"',
        "--mesh cp2",
        '--mesh "cp2 tp2" --parallel.sequence True',
        "--mesh dp2 --parallel.zero 3",
        "--mesh dp2 --deterministic True",
    ],
)
def test_dpo_equals_a_plain_program(folder, tmp_path, dpo_losses, words):
    assert dpo_losses[0][0] == pytest.approx(np.log(2), rel=1e-12)
    assert dpo_losses[-1][0] < 0.6
    run = run_of(folder, tmp_path, "pairs", words)
    same(trained(run), dpo_losses)


@pytest.mark.parametrize("mesh", ["dp2 cp2", "tp2", "pp2"])
@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_other_losses_of_pairs_equal_a_plain_program(folder, tmp_path, other_losses, name, mesh):
    expected = other_losses(name)
    assert expected[-1][0] < expected[0][0]
    words = f"--mesh '{mesh}' --dpo.loss_type {name} {OTHER_LOSSES[name][1]}"
    same(trained(run_of(folder, tmp_path, "pairs", words)), expected)


def test_a_loss_without_a_reference_model_stores_and_reads_none(folder, tmp_path, other_losses):
    loss = f"--dpo.loss_type orpo --eval.every 1 --eval.source {folder}/pairs.jsonl"
    head = trained(run_of(folder, tmp_path, "pairs", f"--mesh dp2 {loss} --steps 2"))
    assert not (tmp_path / FOLDER).exists()
    rest = trained(run_of(folder, tmp_path, "pairs", f"--mesh tp2 {loss} --resume auto"))
    same([*head, *rest], other_losses("orpo"))
    other = run_of(folder, tmp_path, "pairs", "--dpo.loss_type hinge --resume auto")
    config = other.model_dump(mode="json")
    (fault,) = resume_faults(other.model, config, resume="auto", out=str(tmp_path))
    assert (fault.key, fault.fix) == ("dpo.loss_type", "--dpo.loss_type orpo")


def test_dpo_resumes_with_the_stored_references_on_another_layout(folder, tmp_path, dpo_losses):
    first = run_of(folder, tmp_path, "pairs", "--mesh dp2 --steps 2")
    head = trained(first)
    other = run_of(folder, tmp_path, "pairs", "--mesh tp2 --resume auto --dpo.beta 0.5")
    config = other.model_dump(mode="json")
    (fault,) = resume_faults(other.model, config, resume="auto", out=str(tmp_path))
    assert (fault.key, fault.fix) == ("dpo.beta", f"--dpo.beta {BETA}")
    rest = trained(run_of(folder, tmp_path, "pairs", "--mesh tp2 --resume auto"))
    same([*head, *rest], dpo_losses)
    data = open_data(first.data, first.model)
    facts = data.facts()
    shape = (data.num_samples, 128)
    stored = read_references(tmp_path, "train", shape=shape, data=facts)
    counts = data.read(np.arange(shape[0])).targets != -100
    assert (stored[counts] < 0).all()
    with pytest.raises(DataError, match="other data"):
        read_references(tmp_path, "train", shape=shape, data={**facts, "sha256": "0"})
    file = tmp_path / FOLDER / "train.bin"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        trained(run_of(folder, tmp_path, "pairs", "--mesh dp2 --resume auto --steps 6"))


KTO = (
    f"--data.format unpaired --loss dpo --dpo.loss_type kto --dpo.beta {BETA}"
    " --dpo.desirable_weight 1.5 --dpo.undesirable_weight 0.75"
)


@pytest.fixture(scope="module")
def kto_losses(folder):
    """Losses of a plain loop by the paper's equations: z0 of each step is the mean, over its records, of
    the gain of the answer of the next record behind the record's prompt.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    records = []
    for index in range(12):
        prompt = [{"role": "user", "content": f"what is {'two ' * (index % 5)}plus {index}?"}]
        answer = [{"role": "assistant", "content": "seven " * (1 + index % 3)}]
        records.append({"prompt": prompt, "completion": answer, "label": index % 3 > 0})
    write_jsonl(folder / "answers.jsonl", records)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def gain(model, first, number, answer_of):
        prompt, answer = records[number]["prompt"], records[answer_of % 12]["completion"]
        before = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        tokens = tokenizer.apply_chat_template(prompt + answer, return_dict=True)["input_ids"]
        mask = [0] * len(before) + [1] * (len(tokens) - len(before))
        with torch.no_grad():
            reference = sum_of_logprobs(first, tokens, mask)
        return sum_of_logprobs(model, tokens, mask) - reference

    run = run_of(folder, folder / "none", "answers", KTO)
    samples = open_data(run.data, run.model)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    first = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0
    )
    found, estimates = [], []
    for step in range(STEPS):
        chosen = samples_of(samples, step, global_size=4, seed=run.seed)
        numbers = np.concatenate([samples.table.rows[each] for each in chosen.tolist()]).tolist()
        with torch.no_grad():
            others = [gain(model, first, number, number + 1) for number in numbers]
        z0 = max(float(sum(others)) / len(numbers), 0.0)
        losses = []
        for number in numbers:
            is_desired = records[number]["label"]
            margin = BETA * (gain(model, first, number, number) - z0)
            value = torch.sigmoid(margin if is_desired else -margin)
            losses.append((1.5 if is_desired else 0.75) * (1 - value))
        loss = sum(losses) / len(numbers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), len(numbers)))
        estimates.append(z0)
    return found, estimates


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--mesh dp2",
        "--mesh dp2 --parallel.zero 3",
        "--mesh dp2 --deterministic True",
        "--mesh tp2 --parallel.sequence True",
        "--mesh cp2",
        "--mesh pp2 --pipeline.schedule 1f1b",
        '--mesh "pp2 dp2" --pipeline.schedule zbv',
    ],
)
def test_kto_equals_a_plain_program(folder, tmp_path, kto_losses, monkeypatch, words):
    losses, estimates = kto_losses
    assert max(estimates) > 0.1
    assert losses[-1][0] < losses[0][0]
    found = []

    def update(self, batches):
        plain_update(self, batches)
        if self.loss is not None:
            found.append(float(self.loss.z0))

    plain_update = KlEstimate.update
    monkeypatch.setattr(KlEstimate, "update", update)
    run = run_of(folder, tmp_path, "answers", f"{KTO} {words}")
    same(trained(run), losses)
    assert set(np.round(found, 9)) == set(np.round(estimates, 9))


def test_kto_resumes_on_another_layout_and_is_evaluated(folder, tmp_path, kto_losses):
    losses, _ = kto_losses
    words = f"{KTO} --eval.every 1 --eval.source {folder}/answers.jsonl"
    head = trained(run_of(folder, tmp_path, "answers", f"{words} --mesh dp2 --steps 2"))
    rest = trained(run_of(folder, tmp_path, "answers", f"{words} --mesh cp2 --resume auto"))
    same([*head, *rest], losses)
