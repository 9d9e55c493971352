"""`docker`: NeMo-Run's DockerExecutor with NVIDIA's flags, one container that runs all ranks of this machine.

The same as `docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 -v $(pwd):/workspace
-w /workspace IMAGE ...`.
"""

from __future__ import annotations

import logging
import shlex
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import rank_states
from common.errors import EXIT_INTERRUPTED, EXIT_RUN, UserError
from launcher.cluster_file import Cluster, plain_name
from launcher.executors import Job
from launcher.executors.on_cluster import torchrun

if TYPE_CHECKING:
    from nemo_run.core.execution.docker import DockerContainer

log = logging.getLogger("launch")
IMAGE = "nvcr.io/nvidia/nemo:25.04"
WORKSPACE = "/workspace"
_OWN = "/nemo_run"  # where NeMo-Run's own log goes, and our script lies


def submit(job: Job) -> int:
    """Start the container, show its lines, end with its exit code.

    Raises:
        UserError: no Docker here, no such image, a container of this run that still runs, or a run of many nodes.
    """
    cluster = _checked(job)
    own = job.folder.path / "docker"
    own.mkdir(parents=True, exist_ok=True)
    (own / "run.sh").write_text(script(job, cluster))
    command = shlex.join(equivalent(job, cluster))
    (own / "command.txt").write_text(command + "\n")
    if job.dryrun:
        log.info("docker: would start\n%s", command)
        return 0
    (own / "exit_code").unlink(missing_ok=True)
    client = _client()
    _have(client, _image(cluster))
    container = _start(client, _container(job, cluster), job)
    log.info("started:   container %s, %d rank(s), image %s", container.name, job.devices, _image(cluster))
    log.info("logs:      %s (each rank), %s", job.logs, own / f"log_{container.name}.out")
    log.info("cancel:    Ctrl-C saves and stops; docker rm -f %s", container.name)
    log.info("resume:    %s", job.resume_command)
    return _follow(container, own, job)


def _checked(job: Job) -> Cluster:
    plain_name(job.folder.name)
    if job.num_nodes > 1:
        raise UserError(
            "docker starts one container on this machine",
            expected="one node",
            found=f"trainer.num_nodes={job.num_nodes}",
            do="--executor slurm or k8s for several nodes",
        )
    return job.cluster or Cluster(devices_per_node=job.devices)


def _image(cluster: Cluster) -> str:
    return cluster.image or IMAGE


def script(job: Job, cluster: Cluster) -> str:
    """What runs in the container: NeMo-Run puts its command between double quotes, so it gets a file's name instead.

    nemo_run 0.4.0 also ends with tee's exit code, not the command's: the script writes its own.
    """
    command = shlex.join(torchrun(job, cluster.python or "python"))
    return "\n".join(
        [
            "#!/bin/bash",
            f"cd {WORKSPACE}",
            f"{command} &",
            f"echo $! > {_OWN}/pid",
            "wait $!",
            f"echo $? > {_OWN}/exit_code",
            "",
        ]
    )


def _settings(job: Job, cluster: Cluster) -> dict[str, Any]:
    here = str(Path.cwd())
    if ":" in here:
        raise UserError(
            "this folder's name cannot be mounted",
            expected="a path without a colon",
            found=repr(here),
            do="move the checkout",
        )
    mounts = [f"{here}:{WORKSPACE}", f"{here}/{job.folder.path}/docker:{_OWN}", *cluster.mounts]
    return {
        "container_image": _image(cluster),
        "num_gpus": -1 if job.accelerator == "gpu" else None,
        "ipc_mode": "host",
        # nemo_run 0.4.0 documents name=soft[:hard] and splits at the colon; memlock is for what GPUs and NICs pin
        "ulimits": [*(["memlock:-1"] if job.accelerator == "gpu" else []), "stack:67108864"],
        "network": cluster.docker.network,
        "volumes": mounts,
        "env_vars": {**job.env, **cluster.env},
    }


def _container(job: Job, cluster: Cluster) -> DockerContainer:
    from nemo_run.core.execution.docker import DockerContainer, DockerExecutor
    from nemo_run.core.packaging.base import Packager

    executor = DockerExecutor(packager=Packager(), **_settings(job, cluster))
    executor.experiment_id = job.folder.name
    return DockerContainer(name=job.folder.name, command=[f"bash {_OWN}/run.sh"], executor=executor, extra_env={})


def equivalent(job: Job, cluster: Cluster) -> list[str]:
    """The `docker run` that does the same."""
    given = _settings(job, cluster)
    words = ["docker", "run", "--rm", *(["--gpus", "all"] if given["num_gpus"] else []), "--ipc=host"]
    words += [word for limit in given["ulimits"] for word in ("--ulimit", limit.replace(":", "=", 1))]
    words += [f"--network={given['network']}"]
    words += [word for mount in given["volumes"] for word in ("-v", mount)]
    words += [word for key, value in given["env_vars"].items() for word in ("-e", f"{key}={value}")]
    return [*words, "-w", WORKSPACE, given["container_image"], *torchrun(job, cluster.python or "python")]


def _client() -> Any:
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


def _have(client: Any, image: str) -> None:
    """Pull the image if it is not here.

    Raises:
        UserError: nobody has it.
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


def _start(client: Any, container: DockerContainer, job: Job) -> Any:
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


def _follow(container: Any, own: Path, job: Job) -> int:
    """Its lines on standard error until it ends; Ctrl-C asks the ranks to save and stop, a second one removes it."""
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
            # the ranks themselves: torchrun would give them 30 s and then kill them in a save
            ranks = [str(state.pid) for state in rank_states.read(job.logs) if state.state == rank_states.RUNNING]
            container.exec_run(["bash", "-c", f"kill -INT {' '.join(ranks) or f'$(cat {_OWN}/pid)'}"])
    return _end(own, job, asked)


def _end(own: Path, job: Job, asked: bool) -> int:
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
    log.error("the container ended %s; its log: %s", what, own)
    return EXIT_RUN
