"""Volumes of a Kubernetes cluster file: one row each, the source written as the Kubernetes API has it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

SOURCES: tuple[str, ...] = (
    "nfs",
    "persistentVolumeClaim",
    "hostPath",
    "emptyDir",
    "configMap",
    "secret",
    "csi",
    "ephemeral",
)
SOURCES += ("cephfs", "iscsi", "fc", "projected")
RESERVED = ("work", "shm", "written")  # volumes that every job has


class Volume(BaseModel):
    """A volume, and where the pods see it.

    Args:
        name: its name in the pod.
        mount_path: `mountPath`, the folder in the container.
        read_only: `readOnly`: nothing can be written there.
        sub_path: `subPath`: the folder of the volume that is mounted.
        source: the one other key of the row, a volume source of the API: `nfs: {server: HOST, path: /export}`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    mount_path: Annotated[str, StringConstraints(pattern=r"^/[^:\x00-\x1f]*$", max_length=4096)]
    read_only: bool = False
    sub_path: str | None = None
    source: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _read_row(cls, row: Any) -> Any:
        """The keys of the API, and the source apart from them."""
        if not isinstance(row, dict):
            return row
        names = {"mountPath": "mount_path", "readOnly": "read_only", "subPath": "sub_path"}
        source = {key: value for key, value in row.items() if key in SOURCES}
        others = {names.get(key, key): value for key, value in row.items() if key not in SOURCES}
        if len(source) != 1:
            raise ValueError(
                f"a volume has one source, one of {', '.join(SOURCES)} (here: {', '.join(source) or 'none'})"
            )
        return {**others, "source": source}

    @model_validator(mode="after")
    def _not_reserved(self) -> Volume:
        if self.name in RESERVED or self.name.startswith("host-"):
            raise ValueError(f"every job has volumes named {', '.join(RESERVED)} and host-N: take another name")
        return self

    @property
    def volume(self) -> dict[str, Any]:
        """The row of the pod's `volumes`."""
        return {"name": self.name, **self.source}

    @property
    def mount(self) -> dict[str, Any]:
        """The row of a container's `volumeMounts`."""
        more = {"readOnly": True} if self.read_only else {}
        return {
            "name": self.name,
            "mountPath": self.mount_path,
            **more,
            **({"subPath": self.sub_path} if self.sub_path else {}),
        }
