"""Training across two sites on a link of 100 Mbit/s: loss, bytes and speed; a site that is killed and returns.

Each site is a network namespace with one rank under torchrun; needs root, and the repository as the working folder.

python -m benchmarks.sites compare --steps 200           one row for each setting, at equal tokens
python -m benchmarks.sites outage --steps 400            site 1 is killed and started again
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.clusters.hosts import Hosts, unavailable

RATE = "100mbit"
NUM_SITES = 2
PREFIX, NETWORK = "sites", 83
"""Of the namespaces: others than those of tests, which may run at the same time."""
NUM_LAST = 20
"""Last steps whose losses are averaged."""
NUM_WARM_UP = 5
"""First steps that count in no speed."""
MODEL = ("--data.seq_len", "128", "--batch.global_size", "16", "--batch.micro_size", "4")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "WEFT_PROVE_BEFORE": "never",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "synchronous (dp2)": ("--mesh", "dp2"),
    "H=20 float32": ("--mesh", "site2", "--site.every", "20"),
    "H=20 bfloat16": ("--mesh", "site2", "--site.every", "20", "--site.wire", "bfloat16"),
    "H=20 int8": ("--mesh", "site2", "--site.every", "20", "--site.wire", "int8"),
    "H=20 int8 overlap 2": (
        *("--mesh", "site2", "--site.every", "20", "--site.wire", "int8"),
        *("--site.overlap", "2"),
    ),
    "H=5 int8": ("--mesh", "site2", "--site.every", "5", "--site.wire", "int8"),
    "H=1 float32": ("--mesh", "site2", "--site.every", "1"),
}
ELASTIC = ("--mesh", "site2", "--site.every", "20", "--site.wire", "int8", "--run.elastic", "True")
PATIENT = ("--run.timeout_s", "120")
"""Hangs are not what is measured, and the cores may be busy."""
WAIT_S = 400.0

Event = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        loss: mean over the last steps.
        eval_loss: of the final model on text that is not trained on.
        sent_bytes: of site 1 through its link, packet headers included.
        tokens_per_s: after the first steps.
    """

    loss: float
    eval_loss: float
    sent_bytes: int
    tokens_per_s: float


def agent_words(
    flags: Sequence[str],
    *,
    nodes: str,
    restarts: int,
) -> list[str]:
    """The command of one site."""
    rendezvous = (
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{PREFIX}0:29400",
        "--rdzv-id",
        "sites",
    )
    conf = "last_call_timeout=2,join_timeout=90,keep_alive_interval=2,keep_alive_max_attempt=5"
    words = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--rdzv-conf", conf]
    words += ["--nnodes", nodes]
    words += ["--nproc-per-node", "1", "--max-restarts", str(restarts), "-m", "weft", "train"]
    return [*words, *MODEL, "--device", "cpu", *flags]


def events(out: Path) -> list[Event]:
    """The events of a run so far."""
    path = out / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def steps_of(out: Path) -> list[Event]:
    """The events of steps."""
    return [event for event in events(out) if event["event"] == "step"]


def sent_bytes(hosts: Hosts, index: int) -> int:
    """What a site has sent through its link so far."""
    counter = "/sys/class/net/eth0/statistics/tx_bytes"
    words = ["ip", "netns", "exec", hosts.names[index], "cat", counter]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@contextmanager
def ended(agents: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End all agents, with their ranks, after the block."""
    try:
        yield
    finally:
        for agent in agents:
            kill(agent)


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its rank at once, as a power cut would."""
    if agent.poll() is not None:
        return
    ranks = psutil.Process(agent.pid).children(recursive=True)
    os.killpg(agent.pid, signal.SIGKILL)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.kill()
    agent.wait()


def wait_until(
    condition: Callable[[], bool],
    what: str,
    logs: Sequence[Path],
) -> float:
    """Wait; returns the seconds.

    Raises:
        RuntimeError: it takes too long.
    """
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > WAIT_S:
            text = "\n".join(log.read_text(errors="replace")[-2000:] for log in logs)
            raise RuntimeError(f"{what} did not come within {WAIT_S:g} s\n{text}")
        time.sleep(0.05)
    return time.monotonic() - start


def train(
    flags: Sequence[str],
    *,
    steps: int,
    folder: Path,
    held_out: str,
) -> Result:
    """Train to the end on two sites."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    evaluation = ("--eval.every", str(steps), "--eval.source", held_out)
    words = agent_words(
        [*flags, *evaluation, *PATIENT, "--steps", str(steps), "--out", str(out)],
        nodes="2",
        restarts=0,
    )
    logs = [folder / f"{index}.log" for index in range(NUM_SITES)]
    with Hosts(
        NUM_SITES,
        rate=RATE,
        prefix=PREFIX,
        network=NETWORK,
    ) as hosts:
        agents = [
            hosts.start(
                index,
                words,
                env=ENVIRONMENT,
                log=log,
            )
            for index, log in enumerate(logs)
        ]
        with ended(agents):
            wait_until(lambda: bool(steps_of(out)), "the first step", logs)
            before = sent_bytes(hosts, 1)
            first = len(steps_of(out))

            def is_over() -> bool:
                return all(agent.poll() is not None for agent in agents)

            wait_until(lambda: len(steps_of(out)) >= steps or is_over(), "the last step", logs)
            num_bytes = sent_bytes(hosts, 1) - before
            wait_until(is_over, "the end", logs)
    done = steps_of(out)
    timed = done[NUM_WARM_UP:]
    seconds = sum(event["step_s"] for event in timed)
    losses = [event["loss"] for event in done[-NUM_LAST:]]
    (evaluated,) = [event for event in events(out) if event["event"] == "eval"]
    return Result(
        loss=sum(losses) / len(losses),
        eval_loss=evaluated["loss"],
        sent_bytes=num_bytes * steps // (steps - first),
        tokens_per_s=sum(event["tokens"] for event in timed) / seconds,
    )


def compare(
    steps: int,
    names: Sequence[str],
    held_out: str,
) -> None:
    """A row for each setting."""
    print(f"{steps} steps, two sites, {RATE}")
    print("| setting | loss, last 20 | held out | sent by a site | a step | tokens/s |")
    print("|---|---|---|---|---|---|")
    for name in names or SETTINGS:
        with tempfile.TemporaryDirectory(prefix="weft-sites-") as folder:
            result = train(
                SETTINGS[name],
                steps=steps,
                folder=Path(folder),
                held_out=held_out,
            )
        sent = result.sent_bytes / 1e6
        print(
            f"| {name} | {result.loss:.3f} | {result.eval_loss:.3f} | {sent:.1f} MB"
            f" | {1e3 * sent / steps:.0f} kB | {result.tokens_per_s:,.0f} |",
            flush=True,
        )


def outage(steps: int) -> None:
    """Site 1 is killed, the other goes on alone, site 1 returns."""
    with (
        tempfile.TemporaryDirectory(prefix="weft-sites-") as name,
        Hosts(
            NUM_SITES,
            rate=RATE,
            prefix=PREFIX,
            network=NETWORK,
        ) as hosts,
    ):
        folder = Path(name)
        out = folder / "run"
        flags = [
            *ELASTIC,
            *("--steps", str(steps)),
            *("--save.every", "10"),
            *("--save.keep", "3"),
            *("--out", str(out)),
        ]
        words = agent_words(flags, nodes="1:2", restarts=5)
        logs = [folder / f"{index}.log" for index in range(NUM_SITES)]

        def start(index: int) -> Any:
            return hosts.start(
                index,
                words,
                env=ENVIRONMENT,
                log=logs[index],
            )

        agents = [start(index) for index in range(NUM_SITES)]
        with ended(agents):
            wait_until(lambda: len(steps_of(out)) >= 45, "step 45", logs)
            print(f"step {last_step(out)}: site 1 is killed", flush=True)
            kill(agents[1])
            took_s = wait_until(lambda: goes_on_with(out, "site1"), "one site", logs)
            print(f"goes on with one site after {took_s:.1f} s: {resumed(out)}", flush=True)
            wait_until(lambda: goes_on_with(out, "site1", more=25), "more steps", logs)
            print(f"step {last_step(out)}: site 1 is started again", flush=True)
            agents.append(start(1))
            took_s = wait_until(lambda: goes_on_with(out, "site2", more=5), "both sites", logs)
            print(f"both sites train after {took_s:.1f} s: {resumed(out)}", flush=True)
            wait_until(lambda: last_step(out) >= steps, "the last step", logs)
        losses = []
        for event in steps_of(out):
            if event["step"] % 20 == 0:
                losses.append(f"{event['step']}: {event['loss']:.3f}")
        print("loss: " + ", ".join(losses))


def last_step(out: Path) -> int:
    """Number of the last step that is logged."""
    number: int = steps_of(out)[-1]["step"]
    return number


def starts(out: Path) -> list[tuple[int, str]]:
    """Place among the events, and mesh, of each start of the ranks."""
    found = []
    for place, event in enumerate(events(out)):
        if event["event"] == "run":
            found.append((place, event["layout"]))
    return found


def goes_on_with(
    out: Path,
    mesh: str,
    *,
    more: int = 1,
) -> bool:
    """Whether the ranks were started again on this mesh, and have made some steps."""
    begun = starts(out)
    if len(begun) < 2:
        return False
    place, last_mesh = begun[-1]
    if last_mesh != mesh:
        return False
    steps = [event for event in events(out)[place:] if event["event"] == "step"]
    return len(steps) >= more


def resumed(out: Path) -> str:
    """From where the ranks resumed last."""
    found = [event for event in events(out) if event["event"] == "resume"]
    if not found:
        return "from 0"
    last = found[-1]
    return f"resumed from step {last['step']} of {last['layout']}"


def main() -> None:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("what", choices=("compare", "outage"), help="the measurement")
    parser.add_argument("--steps", type=int, default=200, help="training steps of a run")
    parser.add_argument(
        "--only",
        nargs="*",
        default=(),
        choices=tuple(SETTINGS),
    )
    parser.add_argument(
        "--held-out",
        default="src/weft/train/*.py",
        help="text to evaluate on",
    )
    given = parser.parse_args()
    problem = unavailable()
    if problem:
        sys.exit(f"no network namespaces here: {problem}")
    if given.what == "compare":
        compare(given.steps, given.only, given.held_out)
    else:
        outage(given.steps)


if __name__ == "__main__":
    main()
