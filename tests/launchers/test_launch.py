"""`weft launch`: job files of every engine against reviewed golden files, and rejected input, for which nothing is written.

WEFT_GOLDEN=1 writes the golden files again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from weft.cli import main
from weft.commands.launch import _request as parse_request
from weft.config.load import load
from weft.launchers.catalog import ENGINES
from weft.launchers.job import ClusterJob
from weft.launchers.kubeflow import kubernetes_name
from weft.launchers.yaml_text import yaml_text
from weft.models import FAMILIES

MODEL = """from dataclasses import dataclass
from torch import nn
@dataclass
class Config:
    vocab: int = 256
    dim: int = 8
def blocks(config):
    return {"embed": nn.Embedding(config.vocab, config.dim), "head": nn.Linear(config.dim, config.vocab)}
AXES = {"embed.weight": ("vocab", "embed"), "head.weight": ("vocab", "embed"), "head.bias": ("vocab",)}
"""
GOLDEN = Path(__file__).parents[1] / "golden" / "launchers"
SPARE_SCRIPT = GOLDEN / "slurm_spare.sh"
CONFIG = 'mesh = "dp2 tp2"\nsteps = 3\nout = "/shared/runs/first"\n'
OPTIONS = {
    "slurm": ["--time", "4:00:00", "--partition", "gpu", "--cpus-per-rank", "8"],
    "ray": ["--cpus-per-rank", "8"],
    "kubeflow": ["--image", "registry/weft:1", "--volume", "runs"],
    "skypilot": ["--bucket", "s3://runs", "--cpus-per-rank", "8"],
}
MESH = ("--mesh", "dp2 tp2", "--nodes", "2")


def job() -> ClusterJob:
    return ClusterJob(
        name="first",
        nodes=2,
        ranks_per_node=2,
        gpus_per_node=2,
        cpus_per_rank=8,
        restarts=3,
        folder=Path("/shared/runs/first/job"),
        work_folder=Path("/home/user/a project"),
        config=CONFIG,
        python="/shared/venv/bin/python",
    )


def rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["launch", *words]) == 2
    text = capsys.readouterr().err
    for line in text.splitlines():
        assert line.startswith("error: ")
    return text


@pytest.mark.parametrize("name", ENGINES)
def test_job_files_are_the_golden_files(name):
    engine = ENGINES[name]
    options = parse_request([name, *OPTIONS[name]]).options
    for file, text in engine.files(job(), options).items():
        if os.environ.get("WEFT_GOLDEN"):
            (GOLDEN / file).write_text(text, encoding="utf-8")
        assert text == (GOLDEN / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_gets_the_same_run_config(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    out = tmp_path / "run"
    words = [name, *MESH, "--optim.lr", "0.001", "--out", str(out), *OPTIONS[name]]
    assert main(["launch", *words]) == 0
    assert "not submitted" in capsys.readouterr().out
    argv = [str(out / "job" / "config.toml")]
    run = load(argv, FAMILIES)
    expected = load(["--mesh", "dp2 tp2", "--optim.lr", "0.001"], FAMILIES)
    folder = str(out) if ENGINES[name].shares_folder else "/weft/runs/run"
    assert run == expected.with_values({"out": folder, "resume": "auto"})


@pytest.mark.parametrize("name", ENGINES)
def test_a_job_whose_out_is_a_url_has_a_local_folder_and_copies(
    name, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    url = "file://bucket/run7"
    actual = main(["launch", name, *MESH, *OPTIONS[name], "--out", url])
    assert actual == 0
    (path,) = tmp_path.glob("runs/remote/run7-*/job/config.toml")
    config = load([str(path)], FAMILIES)
    assert config.save.remote == url
    assert config.resume == "auto"
    assert Path(config.out or "").name == path.parents[1].name


def test_an_installed_engine_gets_the_job_file(tmp_path, capfd, monkeypatch):
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "got $# $1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    out = tmp_path / "a run"
    assert main(["launch", "slurm", *MESH, "--out", str(out)]) == 0
    assert f"got 1 {out}/job/slurm.sh" in capfd.readouterr().out


def test_a_refused_submission_is_an_error(tmp_path, capfd, monkeypatch):
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["launch", "slurm", *MESH, "--out", str(tmp_path / "run")]) == 1
    assert "exit code 3; the job is not submitted" in capfd.readouterr().err


def test_the_batch_script_with_spare_nodes_and_snapshots_is_the_golden_file():
    options = parse_request(["slurm", *OPTIONS["slurm"], "--spare_nodes", "1"]).options
    (text,) = ENGINES["slurm"].files(replace(job(), takes_snapshots=True), options).values()
    if os.environ.get("WEFT_GOLDEN"):
        SPARE_SCRIPT.write_text(text, encoding="utf-8")
    assert text == SPARE_SCRIPT.read_text(encoding="utf-8")
    assert "nodes=3" in text


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["launch", "slurm", "--dry-run", *MESH, "--out", str(out)]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    assert not out.exists()


def test_a_bad_order_of_axes_on_the_nodes_of_the_job_is_noted(tmp_path, capsys):
    words = ["launch", "slurm", "--dry-run", "--nodes", "2", "--out", str(tmp_path / "run")]
    assert main([*words, "--mesh", "tp2 dp2"]) == 0
    assert "note: mesh order: tp2 is on 2 nodes, and dp2" in capsys.readouterr().out
    assert main([*words, "--mesh", "dp2 tp2"]) == 0
    assert "mesh order" not in capsys.readouterr().out


@pytest.mark.parametrize("script", [GOLDEN / "slurm.sh", SPARE_SCRIPT])
def test_the_batch_script_is_valid_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(("num_left", "num_starts"), [(2, 2), (1, 1)])
def test_after_a_lost_node_the_script_waits_for_the_rest_and_starts_where_there_are_enough(
    num_left, num_starts, tmp_path
):
    """The first start of the ranks fails, and once also the step that tries all nodes."""
    programs = {
        "srun": """case "$*" in
  *node_keeper | *batch_watch) echo "$*" >> keepers ;;
  *true) echo "$*" >> tries; [ $(wc -l < tries) -gt 1 ] ;;
  *) echo "$*" >> starts; [ $(wc -l < starts) -gt 1 ] ;;
esac""",
        "squeue": f"echo {num_left}",
        "scontrol": 'echo "$@" >> queued',
        "sleep": "exec /bin/sleep 0.05",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", str(SPARE_SCRIPT)],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    starts = (tmp_path / "starts").read_text().splitlines()
    assert len(starts) == num_starts
    assert all("--nodes=2 --ntasks=4" in line for line in starts)
    tries = (tmp_path / "tries").read_text().splitlines()
    assert [f"--nodes={num_left}" in line for line in tries] == [True, True]
    keepers = sorted((tmp_path / "keepers").read_text().splitlines())
    for line, module in zip(keepers, ("batch_watch", "node_keeper"), strict=True):
        assert line.endswith(f"-m weft.run.{module}")
        assert "--overlap --no-kill --nodes=3 --ntasks=3 --ntasks-per-node=1" in line
    assert (tmp_path / "queued").exists() == (num_starts == 1)
    assert ("1 nodes are left, 2 are needed; the job is queued again" in done.stdout) == (
        num_starts == 1
    )


@pytest.mark.parametrize(
    ("codes", "starts", "end", "is_queued_again"),
    [
        ("0", 1, 0, False),
        ("2", 1, 2, False),
        ("75", 1, 75, True),
        ("137 1 0", 3, 0, False),
        ("1 75", 2, 75, True),
        ("1 1 1 1 1 1", 4, 1, False),
    ],
)
def test_the_batch_script_starts_failed_ranks_again_and_queues_saved_ones(
    codes, starts, end, is_queued_again, tmp_path
):
    """srun and scontrol are scripts that record their calls; srun ends with each code in turn."""
    (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n")
    srun = """#!/bin/bash
echo "$SLURM_RESTART_COUNT $WEFT_JOB" >> starts
code=$(head -n 1 codes); sed -i 1d codes; exit $code
"""
    scontrol = '#!/bin/bash\necho "$@" >> queued\n'
    for name, text in {"srun": srun, "scontrol": scontrol}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "2",
    }
    command = ["bash", str(GOLDEN / "slurm.sh")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, stdout=subprocess.DEVNULL
    )
    assert done.returncode == end
    lines = [f"{2 + number} slurm 7" for number in range(starts)]
    assert (tmp_path / "starts").read_text().splitlines() == lines
    queued = tmp_path / "queued"
    assert queued.exists() == is_queued_again
    if is_queued_again:
        assert queued.read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "needs an engine first"),
        (["slrum"], "did you mean 'slurm'?"),
        (["slurm", "--mesh", "dp4", "--nodes", "3"], "nodes: does not divide the 4 ranks"),
        (["slurm", *MESH, "--gpus-per-node", "3"], "--gpus-per-node 2, or a mesh of 6"),
        (["slurm", *MESH, "--device", "cpu", "--gpus-per-node", "2"], "the run uses no GPU"),
        (["slurm", *MESH, "--nodes", "0"], "nodes: "),
        (["slurm", *MESH, "--nodez", "2"], "nodez: unknown key"),
        (["slurm", *MESH, "--image", "x"], "image: unknown key"),
        (["slurm", *MESH, "--name", "a; rm -rf x"], "is not a safe name"),
        (["slurm", *MESH, "--partition", "$(id)"], "is not a safe value"),
        (["slurm", *MESH, "--time", "soon"], "is no time limit"),
        (["slurm", *MESH, "--out", '/tmp/a"b'], "is not a safe path"),
        (["slurm", *MESH, "--out", "/tmp/a\nb"], "is not a safe path"),
        (["slurm", *MESH, "--transport", "threads"], "ranks as threads"),
        (["slurm", *MESH, "--optim.lr", "fast"], "optim.lr: "),
        (["kubeflow", *MESH], "image: is needed"),
        (["kubeflow", *MESH, "--image", "a", "--volume", "Runs"], "is no name of Kubernetes"),
        (["skypilot", *MESH], "bucket: is needed"),
        (["skypilot", *MESH, "--bucket", "s3://a;b"], "bucket: "),
        (["slurm", *MESH, "--time", "1", "--save_s", "120"], "--time 1 is 60 s; need more than"),
        (["slurm", *MESH, "--time", "0:30", "--save_s", "30"], "before it has trained"),
        (["slurm", *MESH, "--time", "1-0", "--save_s", "99999"], "save_s"),
        (
            ["kubeflow", *MESH, "--image", "a", "--volume", "r", "--name", "9run"],
            "--name weft-9run",
        ),
        (["skypilot", *MESH, "--bucket", "s3://a", "--wheel", "no.whl"], "wheel: is no wheel"),
        (
            ["skypilot", *MESH, "--bucket", "s3://a", "--image", "x", "--wheel", "a.whl"],
            "leave out",
        ),
    ],
)
def test_what_cannot_run_is_rejected_and_nothing_is_written(
    words, text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert text in rejected(words, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("First_Run", "first-run"), ("20260131-run", "weft-20260131-run"), ("...", "weft")],
)
def test_names_of_run_folders_become_names_of_train_jobs(name, expected):
    assert kubernetes_name(name) == expected


def test_a_wheel_is_copied_and_installed(tmp_path):
    wheel = tmp_path / "weft_train-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    words = ["skypilot", "--bucket", "s3://runs", "--wheel", str(wheel)]
    (text,) = ENGINES["skypilot"].files(job(), parse_request(words).options).values()
    assert f"/weft/job/{wheel.name}: {str(wheel)!r}".replace("'", '"') in text
    assert f"pip install /weft/job/{wheel.name}" in text


def test_a_users_model_is_trusted_by_the_job(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "m.py").write_text(MODEL)
    words = [str(tmp_path / "m.py"), "--mesh", "dp2", "--out", str(tmp_path / "run"), "--dry-run"]
    for engine, options in OPTIONS.items():
        assert main(["launch", engine, *words, *options]) == 0
        assert "--trust_code" in capsys.readouterr().out


def test_the_command_that_a_dry_run_prints_writes_the_job(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    words = [
        "launch",
        "slurm",
        *MESH,
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
        "--dry-run",
    ]
    assert main(words) == 0
    *_, last = capsys.readouterr().out.splitlines()
    command = shlex.split(last.partition("Write and submit it: ")[2])
    assert command[0] == "weft"
    assert main(command[1:]) == 0
    assert (tmp_path / "run" / "job" / "slurm.sh").is_file()


def test_yaml_reads_back_as_it_was():
    yaml = pytest.importorskip("yaml")
    value = {
        "text": "no: yes # 'x' \u2028 \x85 \x7f \U0001f600",
        "block": "first\n\n  second: |\n",
        "spaces": " first\n",
        "empty": {"list": [], "map": {}, "text": "", "none": None},
        "list": [{"a": 1, "b": ["on", True, 0.5]}, ["x"], "1e3"],
    }
    assert yaml.safe_load(yaml_text(value)) == value


def test_the_trainjob_is_valid_for_kubeflow():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    yaml = pytest.importorskip("yaml")
    text = (GOLDEN / "kubeflow.yaml").read_text(encoding="utf-8")
    config_map, train_job = yaml.safe_load_all(text)
    assert config_map["data"]["config.toml"] == CONFIG
    read = models.TrainerV1alpha1TrainJob.from_dict(train_job)
    assert read.to_dict() == train_job
    models.IoK8sApiCoreV1ConfigMap.from_dict(config_map)


def test_the_task_is_valid_for_skypilot(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky")
    if Version(sky.__version__) < Version("0.12"):
        pytest.skip("recover_on_exit_codes: SkyPilot 0.12 and later")
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((GOLDEN / "skypilot.yaml").read_text(encoding="utf-8"))
    local = tmp_path / "config.toml"
    local.write_text(CONFIG)
    mounts = config["file_mounts"]
    mounts["/weft/job/config.toml"] = str(local)
    bucket = mounts.pop("/weft/runs")
    assert bucket == {"source": "s3://runs", "mode": "MOUNT"}
    task = sky.Task.from_yaml_config(config)
    assert task.num_nodes == 2
    (resources,) = task.resources
    assert resources.use_spot
    assert resources.accelerators == {"H100": 2}
    assert resources.job_recovery["max_restarts_on_errors"] == 3


def test_the_driver_script_of_ray_is_python():
    compile((GOLDEN / "ray_job.py").read_text(encoding="utf-8"), "ray_job.py", "exec")


def test_the_job_server_of_ray_runs_the_interpreter_that_has_weft(tmp_path, monkeypatch, capsys):
    """A bare `python` is that of the raylet's PATH."""
    monkeypatch.setenv("PATH", "")  # without ray the command is printed
    run = ["--nodes", "2", "--mesh", "dp2", "--out", str(tmp_path / "run")]
    assert main(["launch", "ray", *run]) == 0
    shown = capsys.readouterr().out
    assert f" -- {sys.executable} " in shown.rpartition("Submit: ")[2]


@pytest.mark.parametrize("engine", OPTIONS)
def test_the_printed_submission_runs_with_files_that_are_there(
    engine, tmp_path, monkeypatch, capsys
):
    """The engine's own command is a stand-in that looks for the files that it is given."""
    monkeypatch.setenv("PATH", "")
    words = [*MESH, "--device", "cpu", "--out", str(tmp_path / "run"), *OPTIONS[engine]]
    assert main(["launch", engine, *words]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    command = shlex.split(last.partition("Submit: ")[2])
    stand_in = tmp_path / "bin" / command[0]
    stand_in.parent.mkdir()
    check = "#!/bin/sh\nfor word; do case $word in /*) test -e $word || exit 1;; esac; done\n"
    stand_in.write_text(check)
    stand_in.chmod(0o700)
    assert any(word.startswith(str(tmp_path / "run" / "job")) for word in command)
    assert subprocess.run([str(stand_in), *command[1:]], check=False).returncode == 0
