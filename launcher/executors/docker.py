"""`docker`: one container that runs all ranks of this machine, through NeMo-Run's DockerExecutor with NVIDIA's flags.

The same as `docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 -v $(pwd):/workspace
-w /workspace IMAGE ...`.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import processes, rank_states
from common.errors import EXIT_INTERRUPTED, EXIT_RUN, UserError
from common.rundir import check_run_name
from launcher.cluster_file import Cluster
from launcher.executors import Job
from launcher.executors.on_cluster import check_run_folder, torchrun_command

if TYPE_CHECKING:
    from nemo_run.core.execution.docker import DockerContainer

log = logging.getLogger("launch")
IMAGE = "nvcr.io/nvidia/nemo:25.04"
WORKSPACE = "/workspace"
_REMOVAL_S = 120
_INSIDE = "/nemo_run"  # runs/NAME/docker in the container: our script, its exit code, and NeMo-Run's log


def submit(job: Job) -> int:
    """Start the container and show its lines until it ends.

    Returns:
        0, or the exit code of the rank that failed first; 130 after Ctrl-C.

    Raises:
        UserError: no Docker, no such image, a container of this run that is still there, or a run of several nodes.
    """
    cluster = check(job)
    own = job.folder.path / "docker"
    own.mkdir(parents=True, exist_ok=True)
    (own / "run.sh").write_text(container_script(job, cluster))
    command = shlex.join(docker_run_command(job, cluster))
    (own / "command.txt").write_text(command + "\n")
    if job.dryrun:
        log.info("docker: would start\n%s", command)
        return 0
    (own / "exit_code").unlink(missing_ok=True)
    client = _connect()
    _pull_if_missing(client, _image(cluster))
    container = _start_container(client, _container(job, cluster), job)
    log.info("started:   container %s, %d rank(s), image %s", container.name, job.devices, _image(cluster))
    log.info("logs:      %s (each rank), %s", job.logs, own / f"log_{container.name}.out")
    log.info("cancel:    Ctrl-C saves and stops; docker rm -f %s stops at once", container.name)
    log.info("resume:    %s", job.resume_command)
    return _follow_container(container, own, job)


def check(job: Job) -> Cluster:
    """The cluster of the job, or one of this machine's, if Docker can run it.

    Raises:
        UserError: a name or a run directory that the container cannot take, or several nodes.
    """
    check_run_name(job.folder.name)
    check_run_folder(job.folder.path, in_checkout=True)
    if job.num_nodes > 1:
        raise UserError(
            "docker starts one container on this machine",
            expected="one node",
            found=f"trainer.num_nodes={job.num_nodes}",
            do="trainer.num_nodes=1, or --executor slurm or k8s with a cluster file",
        )
    return job.cluster or Cluster(devices_per_node=job.devices)


def _image(cluster: Cluster) -> str:
    return cluster.image or IMAGE


def container_script(job: Job, cluster: Cluster) -> str:
    """What runs in the container, as a file: NeMo-Run 0.4.0 puts a command between double quotes.

    It also ends with the exit code of its tee instead of the command's: the script writes the command's to a file.
    Tests: tests/launcher/executors/test_quoting.py and test_docker.py.
    """
    command = shlex.join(torchrun_command(job, cluster.python or "python"))
    return "\n".join(
        [
            "#!/bin/bash",
            f"cd {WORKSPACE}",
            f"{command} &",
            f"echo $! > {_INSIDE}/pid",
            "wait $!",
            f"echo $? > {_INSIDE}/exit_code",
            "",
        ]
    )


def _container_settings(job: Job, cluster: Cluster) -> dict[str, Any]:
    checkout = str(Path.cwd())
    if ":" in checkout:
        raise UserError(
            "this folder's name cannot be mounted",
            expected="a path without a colon",
            found=repr(checkout),
            do="move the checkout",
        )
    mounts = [f"{checkout}:{WORKSPACE}", f"{checkout}/{job.folder.path}/docker:{_INSIDE}", *cluster.mounts]
    return {
        "container_image": _image(cluster),
        "num_gpus": -1 if job.accelerator == "gpu" else None,
        "ipc_mode": "host",
        # nemo_run 0.4.0 documents name=soft[:hard] and splits at the colon; memlock is for what GPUs and NICs pin
        "ulimits": [*(["memlock:-1"] if job.accelerator == "gpu" else []), "stack:67108864"],
        "network": cluster.docker.network,
        "volumes": mounts,
        "env_vars": {**_torchrun_variables(job), **job.env},
    }


def _torchrun_variables(job: Job) -> dict[str, str]:
    """What torchrun would otherwise print a banner about, or warn of, between the lines of the run."""
    threads = max(1, (os.cpu_count() or 1) // job.devices)  # without it torchrun takes 1, and says so
    return {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore::FutureWarning"}


def _container(job: Job, cluster: Cluster) -> DockerContainer:
    from nemo_run.core.execution.docker import DockerContainer, DockerExecutor
    from nemo_run.core.packaging.base import Packager

    executor = DockerExecutor(packager=Packager(), **_container_settings(job, cluster))
    executor.env_vars[processes.LAUNCHER_OUTSIDE] = "1"
    executor.experiment_id = job.folder.name
    return DockerContainer(name=job.folder.name, command=[f"bash {_INSIDE}/run.sh"], executor=executor, extra_env={})


def docker_run_command(job: Job, cluster: Cluster) -> list[str]:
    """The `docker run` that does the same, for the log and for docker/command.txt."""
    given = _container_settings(job, cluster)
    words = ["docker", "run", "--rm", *(["--gpus", "all"] if given["num_gpus"] else []), "--ipc=host"]
    words += [word for limit in given["ulimits"] for word in ("--ulimit", limit.replace(":", "=", 1))]
    words += [f"--network={given['network']}"]
    words += [word for mount in given["volumes"] for word in ("-v", mount)]
    words += [word for key, value in given["env_vars"].items() for word in ("-e", f"{key}={value}")]
    return [*words, "-w", WORKSPACE, given["container_image"], *torchrun_command(job, cluster.python or "python")]


def _connect() -> Any:
    """Docker's client, connected to the daemon.

    Raises:
        UserError: there is no daemon, or this user may not use it.
    """
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env()
        client.ping()
    except DockerException as problem:
        raise UserError(
            "Docker does not answer",
            expected="a daemon, and the right to use it",
            found=str(problem),
            do="start dockerd, or join the group docker",
        ) from None
    return client


def _pull_if_missing(client: Any, image: str) -> None:
    """Pull the image unless this machine has it.

    Raises:
        UserError: no registry gives it.
    """
    from docker.errors import DockerException, ImageNotFound

    try:
        client.images.get(image)
    except ImageNotFound:
        log.info("docker: pulling %s", image)
        try:
            client.images.pull(image)
        except DockerException as problem:
            raise UserError(
                f"there is no image {image}",
                expected="an image that `docker images` lists, or that a registry gives",
                found=str(problem),
                do=f"docker pull {image} must work first; or correct `image` in the cluster file",
            ) from None


def _start_container(client: Any, container: DockerContainer, job: Job) -> Any:
    from docker.errors import APIError

    name = job.folder.name
    try:
        return container.run(client, id=name)
    except APIError as problem:
        taken = problem.status_code == 409
        if not taken and (left := container.get_container(client, id=name)):
            left.remove(force=True)  # created, but it could not start
        raise UserError(
            f"run {name} has a container already" if taken else "Docker refused the container",
            expected="no container of that name" if taken else "a container that starts",
            found=str(problem.explanation),
            do=f"docker rm -f {name}, or --name ANOTHER" if taken else "see what Docker says",
        ) from None


def _follow_container(container: Any, own: Path, job: Job) -> int:
    """Show its lines until it ends; Ctrl-C asks the ranks to save and stop, a second Ctrl-C removes the container."""
    ended = threading.Event()

    def show() -> None:
        try:
            for line in container.logs(stream=True, follow=True):
                sys.stderr.write(line.decode(errors="replace"))
        finally:
            ended.set()

    threading.Thread(target=show, daemon=True).start()
    asked = False
    while not ended.is_set():
        try:
            ended.wait(1.0)
        except KeyboardInterrupt:
            if asked:
                container.remove(force=True)
                return EXIT_INTERRUPTED
            asked = True
            # signal the ranks themselves: torchrun would give them 30 s and then kill them while they save
            ranks = [str(state.pid) for state in rank_states.read(job.logs) if state.state == rank_states.RUNNING]
            # a bash script starts torchrun so that it ignores SIGINT, until it has imported torch
            stop = f"kill -USR1 {' '.join(ranks)}" if ranks else f"kill -TERM $(cat {_INSIDE}/pid)"
            container.exec_run(["bash", "-c", stop])
    _wait_until_removed(container)
    return _report_end(own, job, asked)


def _wait_until_removed(container: Any) -> None:
    """Wait for the daemon, which removes a container some time after its last line: a retry takes the same name."""
    from docker.errors import APIError, NotFound
    from requests.exceptions import RequestException

    try:
        container.wait(condition="removed", timeout=_REMOVAL_S)
    except NotFound:
        return
    except (APIError, RequestException) as problem:
        log.warning("docker: container %s is not removed after %d s: %s", container.name, _REMOVAL_S, problem)


def _report_end(own: Path, job: Job, asked: bool) -> int:
    written = own / "exit_code"
    code = int(written.read_text()) if written.exists() else EXIT_RUN
    if code == 0:
        return 0
    first = rank_states.first_failure(rank_states.read(job.logs))
    if first is not None:
        log.error("rank %d failed first:\n%s", first.rank, first.error.rstrip())
        return first.exit_code
    if asked or any(state.state == rank_states.INTERRUPTED for state in rank_states.read(job.logs)):
        log.warning("stopped; resume with: %s", job.resume_command)
        return EXIT_INTERRUPTED
    what = f"with code {code}" if written.exists() else "before its command did (removed, or out of memory)"
    log.error("the container ended %s; its log is in %s", what, own)
    return EXIT_RUN
