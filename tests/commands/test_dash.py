"""`weft dash`: a server on loopback, who may ask it what, and what it shows when events are appended."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_runs import write_run
from tests.report.test_report import HOSTILE, add_events, data_of
from weft.cli import main
from weft.commands.dash_runs import LOOK_S, MOST_OPEN, MOST_PAGES, FollowedRuns, FollowedStatus
from weft.commands.status import run_status
from weft.errors import EXIT_OK, EXIT_USER, UserError
from weft.prove.losses import StepLosses, keep_losses
from weft.report.page import report_page
from weft.report.recorded_values import RunRecord
from weft.report.run_history import RunHistory
from weft.train.event_lines import to_line
from weft.view.progress import NUM_RECENT

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TOKEN = "the-token-of-this-test"
WAIT_S = 30.0


def step_of(number: int, loss: float = 1.0, **fields: Any) -> dict[str, Any]:
    step = {"event": "step", "step": number, "loss": loss, "grad_norm": 1.0, "lr": 0.1}
    return {**step, "tokens": 100, "tokens_per_s": 50.0, "step_s": 2.0, **fields}


class Client:
    """Requests to a server, as a browser with its cookie makes them unless it is said otherwise."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.cookie = f"weft_dash_{port}={TOKEN}"

    def get(
        self, path: str, *, method: str = "GET", **headers: str
    ) -> tuple[int, str, Mapping[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request(method, path, headers={"Cookie": self.cookie, **headers})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, dict(answer.getheaders())

    @contextlib.contextmanager
    def changes(self, path: str) -> Iterator[Iterator[str]]:
        """The versions that a stream reports."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = connection.getresponse()
        assert answer.getheader("Content-Type", "").startswith("text/event-stream")
        lines = (line.decode().rstrip("\n") for line in answer)
        yield (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
        connection.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "one", [3.0, 2.0], status="", mesh="dp2")
    write_run(folder / "group" / "two", [4.0, 2.5], mesh="dp2 tp2")
    write_run(tmp_path / "outside", [1.0])
    return folder


@pytest.fixture
def client(root: Path) -> Iterator[Client]:
    from weft.commands.dash_app import DashServer

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = DashServer(FollowedRuns(root), listener, token=TOKEN)
        thread = threading.Thread(target=server.serve_until_signal)
        thread.start()
        yield Client(listener.getsockname()[1])
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_the_list_has_the_rows_of_weft_runs(client: Client) -> None:
    code, page, headers = client.get("/")
    assert code == 200
    assert re.findall(r'href="/report\?run=([^"]*)"', page) == ["group%2Ftwo", "one"]
    assert "dp2 tp2" in page
    assert "2.5000" in page
    assert "script-src 'sha256-" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    _, by_loss, _ = client.get("/?sort=loss")
    assert re.findall(r'href="/report\?run=([^"]*)"', by_loss) == ["one", "group%2Ftwo"]
    assert client.get("/?sort=colour")[0] == 400


def test_the_page_of_runs_is_that_of_the_report(root: Path, client: Client) -> None:
    code, page, _ = client.get("/report?run=group/two")
    assert code == 200
    record = RunRecord.read(root / "group" / "two", state="done")
    assert data_of(page) == data_of(report_page([record]))
    _, both, _ = client.get("/report?run=one&run=group%2Ftwo")
    assert [run["name"] for run in data_of(both)["runs"]] == ["one", "two"]
    nine = "&".join(f"run={number}" for number in range(9))
    assert client.get(f"/report?{nine}")[0] == 400


def test_a_page_without_scripts_is_loaded_again_by_the_browser(client: Client) -> None:
    for path in ("/", "/report?run=one"):
        _, page, _ = client.get(path)
        assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in page


def test_scripts_of_a_page_are_those_that_the_policy_of_the_server_names(client: Client) -> None:
    for path in ("/", "/report?run=one"):
        _, page, headers = client.get(path)
        own = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
        assert own is not None
        digests = set(re.findall(r"sha256-[^&']*", own[1]))
        served = set(re.findall(r"sha256-[^&']*", headers["content-security-policy"]))
        assert digests
        assert digests <= served
        assert not re.search(r'\son\w+="|src="', page)


def test_an_appended_event_is_reported_and_shown(root: Path, client: Client) -> None:
    path = "/report?run=one"
    (before,) = re.findall(r'data-version="(\w+)"', client.get(path)[1])
    with client.changes("/changes?run=one") as versions, client.changes("/changes") as lists:
        assert next(versions) == before
        next(lists)
        add_events(root / "one", step_of(3, 1.25))
        after = next(versions)
        assert after != before
        next(lists)
    _, page, _ = client.get(path)
    assert f'data-version="{after}"' in page
    loss = data_of(page)["charts"][0]["series"][0]
    assert loss["y"] == [3, 2, 1.25]
    assert "1.2500" in client.get("/")[1]


def test_losses_of_one_device_appear_when_they_are_kept(root: Path, client: Client) -> None:
    path = "/report?run=one"
    (before,) = re.findall(r'data-version="(\w+)"', client.get(path)[1])
    keep_losses(root / "one", [StepLosses(1, 3.0, 3.0 * (1 + 1e-7), 1e-6)])
    _, page, _ = client.get(path)
    assert f'data-version="{before}"' not in page
    assert "Difference from one device" in [chart["title"] for chart in data_of(page)["charts"]]


def test_a_new_run_appears_in_the_list(root: Path, client: Client) -> None:
    with client.changes("/changes") as versions:
        next(versions)
        write_run(root / "three", [1.0])
        next(versions)
    assert "/report?run=three" in client.get("/")[1]


def test_the_token_is_exchanged_for_a_cookie(client: Client) -> None:
    client.cookie = ""
    code, _, headers = client.get(f"/report?run=one&token={TOKEN}")
    assert code == 303
    assert headers["location"] == "/report?run=one"
    cookie = headers["set-cookie"]
    assert cookie.startswith(f"weft_dash_{client.port}={TOKEN};")
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    client.cookie = cookie.partition(";")[0]
    assert client.get("/report?run=one")[0] == 200


@pytest.mark.parametrize("path", ["/", "/report?run=one", "/changes", "/elsewhere"])
def test_without_the_token_nothing_is_served(path: str, client: Client) -> None:
    with_token = f"{path}{'&' if '?' in path else '?'}token=wrong"
    assert client.get(with_token)[0] == 403  # although the cookie is right
    client.cookie = ""
    code, text, headers = client.get(path)
    assert code == 403
    assert "token" in text
    assert headers["x-content-type-options"] == "nosniff"
    client.cookie = f"weft_dash_{client.port}=wrong"
    assert client.get(path)[0] == 403


def test_other_hosts_and_methods_are_rejected(client: Client) -> None:
    port = client.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
        assert client.get("/", Host=host)[0] == 403, host
    assert client.get("/", Host=f"localhost:{port}")[0] == 200
    for method in ("POST", "HEAD", "PUT", "DELETE", "OPTIONS"):
        code, _, headers = client.get("/", method=method)
        assert code == 405, method
        assert headers["allow"] == "GET"


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "..%2foutside",
        "%2e%2e/outside",
        "group/../../outside",
        "group//two",
        "one/",
        "{absolute}",
        "link",
        "linked",
        "group",
        "one%00",
        "",
    ],
)
def test_a_run_is_named_inside_the_folder_alone(name: str, root: Path, client: Client) -> None:
    (root / "link").symlink_to(root.parent / "outside")
    write_run(root / "linked", [1.0])
    (root / "linked" / "events.jsonl").unlink()
    (root / "linked" / "events.jsonl").symlink_to(root.parent / "outside" / "events.jsonl")
    name = name.replace("{absolute}", str(root.parent / "outside"))
    for page in ("report", "changes"):
        code, text, _ = client.get(f"/{page}?run={name}")
        assert code == 404
        assert "there is no such run" in text
    for path in ("/..%2foutside/events.jsonl", "/../outside/run.toml", "//etc/passwd"):
        assert client.get(path)[0] == 404


def test_texts_of_runs_are_inert(root: Path, client: Client) -> None:
    name = "<img src=x onerror=alert(3)>"
    folder = write_run(root / name, [3.0, 2.0], status="", mesh=HOSTILE)
    add_events(folder, {"event": "note", "step": 1, "text": HOSTILE})
    add_events(folder, {"event": "end", "status": "failed", "error": HOSTILE})
    for path in ("/", "/report?run=%3Cimg%20src%3Dx%20onerror%3Dalert(3)%3E"):
        code, page, _ = client.get(path)
        assert code == 200
        assert "&lt;img" in page
        assert "<img" not in page
        assert "alert(1)</script>" not in page
        assert "\x1b" not in page
        assert page.count("<script") == (1 if path == "/" else 4)
    code, _, headers = client.get("/report?run=%3Cscript%3E")
    assert (code, headers["content-type"]) == (404, "text/plain; charset=utf-8")


def test_damaged_events_are_one_line_and_the_others_are_listed(root: Path, client: Client) -> None:
    with (root / "one" / "events.jsonl").open("a") as file:
        file.write("no event\n" + to_line(step_of(3)))
    for _ in range(2):  # the damage stays where later lines are whole
        code, text, _ = client.get("/report?run=one")
        assert code == 404
        assert "the events cannot be read" in text
        assert text.count("\n") == 1
    assert "/report?run=group%2Ftwo" in client.get("/")[1]


def test_a_followed_status_is_that_of_weft_status(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [3.0 - 0.01 * step for step in range(40)], status="")
    followed = FollowedStatus(folder, tmp_path)
    restart = {"event": "restart", "step": 30, "steps": 40, "reason": "rank 1 died", "attempt": 1}
    appended: list[dict[str, Any]] = [
        {"event": "note", "text": "a note"},
        restart,
        step_of(31, 2.0, step_s=0.5),
        {"event": "end", "status": "finished"},
        {"event": "run", "steps": 60, "start_step": 31},
        *(step_of(number, step_s=0.1) for number in range(32, 70)),
        {"event": "end", "status": "failed", "error": "a fault"},
    ]
    for look, event in enumerate([None, *appended]):
        if event is not None:
            add_events(folder, event)
        status = followed.look(look * LOOK_S).status
        assert status == run_status(folder, now_s=0.0)
    assert (status.state, status.restarts, status.text) == ("failed", 0, "a fault")


def test_only_what_was_appended_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.commands import dash_runs

    folder = write_run(tmp_path / "one", [1.0] * 50, status="")
    read: list[bytes] = []
    parse = dash_runs.parse_run_event
    monkeypatch.setattr(
        dash_runs, "parse_run_event", lambda line: (read.append(line), parse(line))[1]
    )
    history = dash_runs.FollowedHistory(folder)
    assert len(history.look(state="").steps) == 50
    with (folder / "events.jsonl").open("a") as file:
        file.write(to_line(step_of(51)) + '{"event":"step","st')
        file.flush()
        read.clear()
        assert len(history.look(state="").steps) == 51
        assert len(read) == 1
        file.write('ep":52,"loss":1.0,"grad_norm":1.0}\n')
        file.flush()
        assert history.look(state="").steps[-1] == 52
        assert len(read) == 2
    other = tmp_path / "other"
    other.write_text(to_line(step_of(1)))
    os.replace(other, folder / "events.jsonl")
    assert history.look(state="").steps.tolist() == [1]


def test_a_step_of_a_followed_run_takes_about_a_hundred_bytes() -> None:
    history = RunHistory()
    tracemalloc.start()
    try:
        for number in range(1, 10_001):
            history.add(step_of(number, mem_bytes=1.0, stage_mem_bytes=[1.0, 2.0]))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history.steps) == 10_000
    assert used < 1.5 * 2**20


def test_of_50_runs_the_steps_of_few_are_kept(tmp_path: Path) -> None:
    keys = [f"run{number:02}" for number in range(50)]
    for key in keys:
        write_run(tmp_path / key, [1.0] * 60)
    runs = FollowedRuns(tmp_path)
    assert runs.list_page("age").count('href="/report?run=') == 50
    for key in keys:
        assert f"<h1>{key}</h1>" in runs.runs_page([key])
    assert len(runs._open) == MOST_OPEN
    assert len(runs._pages) == MOST_PAGES
    assert [len(each._steps) for each in runs._rows.values()] == [NUM_RECENT + 1] * 50
    assert f"<h1>{keys[0]}</h1>" in runs.runs_page(keys[:1])  # it is read again


def test_a_run_in_the_folder_itself_is_listed(tmp_path: Path) -> None:
    runs = FollowedRuns(write_run(tmp_path / "one", [1.0]))
    assert 'href="/report?run=."' in runs.list_page("age")
    assert "done" in runs.runs_page(["."])
    with pytest.raises(UserError, match="no such run"):
        runs.runs_page([".."])


def test_ctrl_c_ends_streams_at_once_with_code_0(root: Path) -> None:
    words = [sys.executable, "-m", "weft", "dash", str(root)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = re.fullmatch(
            r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})\n", process.stdout.readline()
        )
        assert address is not None
        client = Client(int(address[1]))
        client.cookie = f"weft_dash_{address[1]}={address[2]}"
        with client.changes("/changes") as versions:
            next(versions)
            process.send_signal(signal.SIGINT)
            assert list(versions) == []
        assert process.wait(WAIT_S) == EXIT_OK
        assert process.stderr.read() == ""  # no stream had to be cancelled


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nowhere",), "weft dash: there is no such folder (got 'nowhere')"),
        (("runs", "runs"), "weft dash: takes one folder (got runs runs)"),
        (("runs", "--port", "0"), "port: "),
        (("runs", "--port", "{taken}"), "port: cannot be used: Address already in use"),
        (("runs", "--host", "0.0.0.0"), "host"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...],
    text: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(root.parent)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [word.replace("{taken}", port) for word in words]
        assert main(["dash", *given]) == EXIT_USER
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_missing_package_is_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.commands.dash.importlib.util.find_spec", lambda name: None)
    assert main(["dash", str(root)]) == EXIT_USER
    line = "error: weft dash: starlette is not installed. Fix: pip install 'weft-train[dash]'\n"
    assert capsys.readouterr().err == line


def test_an_empty_folder_is_an_empty_list(tmp_path: Path) -> None:
    assert "There are no runs here yet." in FollowedRuns(tmp_path).list_page("age")
