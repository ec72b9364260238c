"""Three spoiled runs whose pages answer what is wrong with them, for the pictures of docs/runs.md.

    python -m benchmarks.spoiled_runs [OUT]      as root: two hosts are network namespaces of this machine

    slow     dp2: the process of rank 1 is stopped for 85 ms of every 100 ms
    order    tp2 dp2 over two hosts with links of 100 Mbit/s: tp, which sends in every layer, is across them
    right    dp2 tp2, the same run with the axes the other way round
    spike    a text with 512 random bytes in it, in micro-batches of one sequence

The runs stay in OUT (runs/spoiled), each with its report.html.
"""

from __future__ import annotations

import lzma
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.clusters.hosts import Hosts
from tests.clusters.training import run_on_each
from weft.commands.status import run_status

TEXT = Path("examples/data/shakespeare/train.txt.xz")
PERIOD_S, STOPPED_S = 0.1, 0.085
NUM_RANDOM_BYTES = 512
RENDEZVOUS = "--rdzv-backend c10d --rdzv-endpoint weft0:29400 --rdzv-id order"
MODEL = "--model.layers 4 --save.at_end False --prove.during 0 --device cpu --transport process"


def train(out: Path, words: str) -> subprocess.Popen[bytes]:
    """Start a run."""
    command = [sys.executable, "-m", "weft", "train", *MODEL.split(), *words.split()]
    return subprocess.Popen([*command, "--out", str(out)])


def slow(out: Path) -> None:
    """A run one of whose ranks has a seventh of its core."""
    run = train(out, "--mesh dp2 --steps 80 --batch.global_size 8 --batch.micro_size 4")
    while not (events := out / "events.jsonl").exists() or b'"step":1,' not in events.read_bytes():
        time.sleep(PERIOD_S)
    rank = psutil.Process(run_status(out, now_s=time.monotonic()).ranks[1].pid)
    with suppress(psutil.NoSuchProcess):  # it has ended
        while run.poll() is None:
            rank.suspend()
            time.sleep(STOPPED_S)
            rank.resume()
            time.sleep(PERIOD_S - STOPPED_S)


def order(out: Path, mesh: str) -> None:
    """A run of two ranks on each of two hosts."""
    command = [sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS.split()]
    command += ["--nnodes", "2", "--nproc-per-node", "2", "-m", "weft", "train", *MODEL.split()]
    command += ["--steps", "12", "--batch.micro_size", "4", "--mesh", mesh, "--out", str(out)]
    with Hosts(2, rate="100mbit") as hosts:
        run_on_each(hosts, out.parent, command, timeout_s=400)


def spike(out: Path) -> None:
    """A run on a text a part of which is damaged."""
    text = bytearray(lzma.decompress(TEXT.read_bytes())[:400_000])
    text[200_000 : 200_000 + NUM_RANDOM_BYTES] = random.Random(0).randbytes(NUM_RANDOM_BYTES)
    source = out.with_suffix(".txt")
    source.write_bytes(text)
    words = (
        f"--data.source {source} --mesh dp2 --steps 400 --batch.global_size 4 --batch.micro_size 1"
    )
    train(out, f"{words} --guard.spike 1.5").wait()


def main(folder: Path) -> None:
    """Train the runs anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    slow(folder / "slow")
    spike(folder / "spike")
    for name, mesh in (("order", "tp2 dp2"), ("right", "dp2 tp2")):
        order(folder / name, mesh)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/spoiled"))
