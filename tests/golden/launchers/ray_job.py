"""Training run, written by `weft launch ray`. Every node of the Ray cluster needs weft and this folder."""

from weft.launchers.ray_driver import RayJob, run_job

JOB = RayJob(
    name='first',
    config='/shared/runs/first/job/config.toml',
    work_folder='/home/user/a project',
    nodes=2,
    ranks_per_node=2,
    gpus_per_node=2,
    cpus_per_node=16,
    restarts=3,
)

if __name__ == "__main__":
    raise SystemExit(run_job(JOB))
