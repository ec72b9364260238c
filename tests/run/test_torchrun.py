"""`weft train` under the real torchrun: faults of ranks and of the agent, restarts, and a mesh that shrinks and grows."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.programs import WEFT, Program, programs
from tests.run.test_launch import free_port, is_running
from tests.supervised import numbers
from tests.tiny_run import MODEL, SEQUENCES, write_text
from weft.errors import EXIT_OK
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS

WORDS = (
    *("train", "--mesh", "dp2", *MODEL, *SEQUENCES, "--batch.global_size", "4"),
    *("--optim.decay", "constant"),
)
PATIENCE_S = 90
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With a shared store, torch 2.13 does not announce its address to a machine that joins later."""
pytestmark = pytest.mark.timeout(300)


@dataclass
class Agent:
    """A running torchrun, and the run folder of its ranks."""

    process: Program
    out: Path

    def events(self) -> list[dict[str, Any]]:
        path = self.out / EVENTS
        return list(read_events(path)) if path.exists() else []

    def count(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.events())

    def wait(self, seen: Callable[[], bool]) -> None:
        """Until something is seen, or the agent ends."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it did not come"
            time.sleep(0.02)

    def ranks(self) -> dict[int, psutil.Process]:
        """The rank processes, by rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            rank = child.environ().get("RANK")
            if rank is not None:
                found[int(rank)] = child
        return found


@contextmanager
def torchrun(
    out: Path, *words: str, options: tuple[str, ...], env: Mapping[str, str] = {}
) -> Iterator[Agent]:
    data = ("--data.source", str(out.parent / "text.txt"))
    words = (*options, "-m", "weft", *WORDS, *data, "--out", str(out), *words)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    with programs().running("", *words, module="torch.distributed.run", environ=environ) as process:
        yield Agent(process, out)


def one_machine(restarts: int) -> tuple[str, ...]:
    port = str(free_port())
    return ("--nproc-per-node", "2", "--master-port", port, "--max-restarts", str(restarts))


def until_gone(processes: list[psutil.Process], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(is_running(process.pid) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("torchrun")
    write_text(place)
    return place


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGQUIT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_agent_leaves_no_rank(folder, number):
    out = folder / number.name
    with torchrun(out, "--steps", "1000000", options=one_machine(0)) as agent:
        agent.wait(lambda: agent.count("step") > 2)
        ranks = list(agent.ranks().values())
        assert len(ranks) == 2
        agent.process.send_signal(number)
        within_s = 2.0 if number in (signal.SIGKILL, signal.SIGUSR1) else 20.0
        assert until_gone(ranks, within_s=within_s)
        shown = "".join(agent.process.communicate(timeout=PATIENCE_S))
    if number in (signal.SIGTERM, signal.SIGHUP):
        *_, end = agent.events()
        assert end["event"] == "end"
        assert end["status"] == "stopped"
        assert f"and saved. Resume: weft train {out}/run.toml --resume auto" in shown
        assert (out / "ckpt" / f"step-{end['steps']:06d}").is_dir()


@pytest.mark.slow
def test_a_killed_and_a_stopped_rank_are_named_and_the_run_resumes_bit_identically(folder):
    out = folder / "restarted"
    source = ("--data.source", str(folder / "text.txt"))
    steps = ("--steps", "200")
    with torchrun(out, *steps, "--save.every", "10", options=one_machine(2)) as agent:
        agent.wait(lambda: agent.count("save") > 0)
        agent.ranks()[0].send_signal(signal.SIGKILL)
        agent.wait(lambda: agent.count("resume") > 0)
        num_saves = agent.count("save")
        agent.wait(lambda: agent.count("save") > num_saves)
        agent.ranks()[1].send_signal(signal.SIGSTOP)
        start = time.monotonic()
        agent.wait(lambda: agent.count("end") > 1)
        detected_s = time.monotonic() - start
        shown = "".join(agent.process.communicate(timeout=PATIENCE_S))
    assert agent.process.wait() == EXIT_OK, shown
    assert "error: rank 0 (dp0): lost; found by rank 1 (dp1): CommError: " in shown
    assert re.search(r"error: rank 1 \(dp1\): (no answer for 1 s: )?stopped", shown)
    assert detected_s < 10.0, "2 s, on busy cores more"
    kinds = [event["event"] for event in agent.events()]
    assert kinds.count("run") == 3
    assert kinds.count("resume") == 2
    assert kinds.count("end") == 3
    assert kinds[-1] == "end"
    straight = folder / "straight"
    where = ("--out", str(straight))
    programs().run(WEFT, *WORDS, *source, *where, *steps).check_returncode()
    assert numbers(agent.out) == numbers(straight)


def machine(port: int) -> tuple[str, ...]:
    """One of one or two machines with one rank each."""
    conf = "last_call_timeout=2,join_timeout=90,keep_alive_interval=2,keep_alive_max_attempt=5"
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    job = ("--rdzv-id", "job7", "--rdzv-conf", conf)
    return ("--nnodes", "1:2", "--nproc-per-node", "1", *rendezvous, *job, "--max-restarts", "3")


def layouts(agent: Agent) -> list[str]:
    return [event["layout"] for event in agent.events() if event["event"] == "run"]


@pytest.mark.slow
def test_an_elastic_run_shrinks_to_the_machines_left_and_returns_to_its_mesh(folder):
    out = folder / "elastic"
    words = ("--run.elastic", "True", "--save.every", "10", "--steps", "1000000")
    options = machine(free_port())
    with torchrun(out, *words, options=options, env=NEW_STORE) as first:
        time.sleep(3.0)
        with torchrun(out, *words, options=options, env=NEW_STORE) as second:
            # on a busy machine the first one may begin before the second one has joined
            first.wait(
                lambda: layouts(first)[-1:] == ["dp2"] and first.events()[-1]["event"] == "step"
            )
            num_before = len(layouts(first))
            second.process.kill()

        def trains_on_layout(number: int) -> bool:
            last = first.events()[-1]
            return len(layouts(first)) == number and last["event"] == "step"

        first.wait(lambda: trains_on_layout(num_before + 1))
        with torchrun(out, *words, options=options, env=NEW_STORE) as third:
            first.wait(lambda: trains_on_layout(num_before + 2))
            third.process.kill()
    assert layouts(first)[num_before - 1 :] == ["dp2", "dp1", "dp2"]
    notes = [event["text"] for event in first.events() if event.get("kind") == "elastic"]
    assert len(notes) == layouts(first).count("dp1")
    assert notes[-1] == ("1 of 2 ranks: layout dp1 instead of dp2 (run.elastic), same global batch")


@pytest.mark.slow
def test_one_rank_chooses_the_mesh_for_all_and_its_error_is_printed(folder):
    out = folder / "auto"
    with torchrun(out, "--mesh", "auto", "--steps", "2", options=one_machine(0)) as agent:
        shown = "".join(agent.process.communicate(timeout=PATIENCE_S))
        assert agent.process.returncode == 0, shown
    chosen = re.search(
        r"^mesh auto -> (\S+) \(of \d+ legal layouts of 2 ranks", shown, re.MULTILINE
    )
    assert chosen is not None, shown
    assert f'mesh = "{chosen[1]}"' in (out / "run.toml").read_text()
    assert agent.count("step") == 2

    out = folder / "auto-fails"
    words = ("--mesh", "auto", "--batch.global_size", "1", "--model.heads", "1", "--model.kv_heads", "1",
             "--model.layers", "1", "--pipeline.split", "1", "--model.ffn", "63", "--data.seq_len", "31")  # fmt: skip
    with torchrun(out, *words, options=one_machine(0)) as agent:
        shown = "".join(agent.process.communicate(timeout=PATIENCE_S))
        assert agent.process.returncode != 0
    assert "mesh: auto finds no legal layout of 2 ranks" in shown
    assert not out.exists()
