"""Merge environment sets: base < sets < tier < the user's shell < the cluster file, before torch is imported.

`--env dual+prod` names layers joined by `+`; a layer with a slash or the ending .env is a file, such as
`doctor --write` makes. Variables that the shell sets already keep their values; those of a cluster file's `env`
overrule them, because the file describes the machines that train. docs/environment.md explains each variable.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.commands import launch_command
from common.environment import vccl
from common.environment.sets import BACKEND_KEY, BASE, ONLY_IF, SETS, TIERS, TIMEOUT_KEY, VERBATIM, Table
from common.errors import UserError, unknown_name
from common.small_files import read_small_file

USER, CLUSTER = "user", "cluster file"  # sources of a setting, beside the names of the layers
_LINE = re.compile(r"(?:export\s+)?(?P<key>[A-Za-z_]\w*)=(?P<value>.*)")


class Parallelism(Protocol):
    """The numbers of a run that decide which variables it needs; `recipes.plan.Plan` has them."""

    @property
    def accelerator(self) -> str:
        """`gpu` or `cpu`."""

    @property
    def devices(self) -> int:
        """Ranks per node."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the run."""

    @property
    def data_parallel(self) -> int:
        """Replicas of the model."""

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share each layer."""

    @property
    def context_parallel(self) -> int:
        """Ranks that share each sequence."""


@dataclass(frozen=True)
class Setting:
    """One variable: its value, its source (a layer's name, `user` or `cluster file`) and the reason for it.

    Args:
        only_if: the parallelism without which the variable has no use; empty if the parallelism is known.
    """

    key: str
    value: str
    source: str
    reason: str
    only_if: str = ""


@dataclass(frozen=True)
class Site:
    """The machines that train, as a cluster file describes them.

    Args:
        variables: the file's `env`; overrules the sets and the shell of the machine that submits.
        file: its path.
        elsewhere: the ranks start on other machines or in a container: no library can be looked at from here.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    file: str = ""
    elsewhere: bool = False


def parse_layers(name: str) -> list[tuple[str, Table]]:
    """Split `dual+prod` into its layers, in the order in which they apply: base, the sets as written, the tier.

    Raises:
        UserError: an unknown layer, two tiers, or a file that cannot be read.
    """
    if name.startswith("+"):
        raise UserError(
            f"{name!r} adds to the set of a recipe, and no recipe is named here",
            expected="SET, or SET+SET+TIER",
            found=repr(name),
            do=launch_command("env", f"dual{name}", "--explain"),
        )
    words = [word.strip() for word in name.split("+")]
    tiers = [word for word in words if word in TIERS]
    if len(tiers) > 1:
        raise UserError(
            f"two tiers in {name!r}",
            expected="one of " + ", ".join(TIERS),
            found=" and ".join(tiers),
            do=f"--env {name.replace('+' + tiers[-1], '', 1)}",
        )
    others = [
        (word, SETS[word] if word in SETS else _read_file(word)) for word in words if word not in (*TIERS, "base")
    ]
    return [("base", BASE), *others, *((tier, TIERS[tier]) for tier in tiers)]


def complete_name(asked: str | None, own: str) -> str:
    """The layers of a run: what `--env` names replaces the recipe's own set; with a + in front it is added to it.

    Args:
        asked: `--env` as it was typed; None if it was not.
        own: the recipe's set.
    """
    if asked is None:
        return own
    return own + asked if asked.startswith("+") else asked


def _read_file(word: str) -> Table:
    """Read a layer from a file of `export KEY=value  # reason` lines, without executing anything in it."""
    if "/" not in word and not word.endswith(".env"):
        also = ", or a FILE.env; joined as in dual+prod, or added to the recipe's as in +prod"
        lists = f"{launch_command('env')} explains them; without --env a run takes the recipe's own"
        raise unknown_name("environment set", word, (*SETS, *TIERS), lists, also)
    try:
        lines = read_small_file(word).splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(
            f"cannot read the environment file {word}",
            expected="a file of KEY=value lines, such as `doctor --write` makes",
            found=str(problem),
            do=launch_command("doctor", "--write", word),
        ) from None
    table: Table = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            key, value, reason = _parse_line(line.strip(), f"{word}:{number}")
            table[key] = (value, reason or f"from {word}")
    return table


def _parse_line(line: str, where: str) -> tuple[str, str, str]:
    """KEY, value and comment of one shell assignment of a plain value."""
    code, _, reason = line.partition(" #")
    match = _LINE.fullmatch(code.strip())
    try:
        lexer = shlex.shlex(match["value"] if match else "", posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        words = list(lexer)  # `b;id` is three words, and so refused
    except ValueError:
        match = None
    if not match or len(words) > 1 or re.search(r"[$`]", match["value"]):
        raise UserError(
            f"cannot read line {where}",
            expected="export KEY=value, the value plain or quoted (without $ and commands)",
            found=repr(line),
            do="correct the line",
        )
    return match["key"], "".join(words), reason.strip()


def resolve_environment(
    name: str, environ: Mapping[str, str], parallelism: Parallelism | None = None, site: Site | None = None
) -> list[Setting]:
    """Merge the layers of `name` with `environ` and the site, for a run of this parallelism.

    Args:
        parallelism: None keeps all variables, and names in `only_if` what they need.
        site: the machines that train; None is this one.

    Raises:
        UserError: no such set, values that exclude each other, or no usable VCCL library.
    """
    site = site or Site()
    given = {**environ, **site.variables}
    layers = parse_layers(name)
    merged = _merge_layers(layers, given, parallelism)
    merged = {s.key: Setting(s.key, environ[s.key], USER, s.reason) if s.key in environ else s for s in merged.values()}
    merged |= {key: _from_site(key, value, environ, site) for key, value in site.variables.items()}
    _check_values({**given, **{s.key: s.value for s in merged.values() if not s.only_if}})
    if any(source in vccl.SETS for source, _ in layers):
        rows = vccl.settings_elsewhere(given) if site.elsewhere else vccl.preload_settings(given)
        merged |= {row[0]: Setting(*row) for row in rows}
    return list(merged.values())


def _merge_layers(
    layers: Sequence[tuple[str, Table]], given: Mapping[str, str], parallelism: Parallelism | None
) -> dict[str, Setting]:
    """The settings of the layers by variable; a later layer replaces an earlier one."""
    merged: dict[str, Setting] = {}
    for source, table in layers:
        for key, (value, reason) in table.items():
            condition = "" if source in VERBATIM else ONLY_IF.get(key, "")
            if condition and parallelism is not None and not _holds(condition, parallelism, given):
                continue
            if parallelism is not None and source in SETS and source not in VERBATIM:
                value = _show_more_gpus(key, value, parallelism)
            merged[key] = Setting(key, value, source, reason, condition if parallelism is None else "")
    return merged


def _from_site(key: str, value: str, environ: Mapping[str, str], site: Site) -> Setting:
    overruled = f"; overrules {environ[key]!r} of your shell" if environ.get(key, value) != value else ""
    return Setting(key, value, CLUSTER, (site.file or "its `env`") + overruled)


def apply_environment(
    name: str,
    environ: MutableMapping[str, str],
    parallelism: Parallelism | None = None,
    site: Site | None = None,
) -> list[Setting]:
    """Set the variables of `name` and of the site in `environ`; others that are set already keep their values.

    Without `parallelism`, variables that need a certain parallelism are left out. Libraries to be loaded on other
    machines are not set here: this process starts programs of its own. Raises as `resolve_environment`.
    """
    settings = [setting for setting in resolve_environment(name, environ, parallelism, site) if not setting.only_if]
    skipped = vccl.PRELOADS if site is not None and site.elsewhere else ()
    environ.update({setting.key: setting.value for setting in settings if setting.key not in skipped})
    return settings


def _holds(condition: str, parallelism: Parallelism, environ: Mapping[str, str]) -> bool:
    ranks = parallelism.devices * parallelism.num_nodes
    return {
        "one rank, and no OMP_WAIT_POLICY of yours": ranks == 1 and "OMP_WAIT_POLICY" not in environ,
        "several ranks": ranks > 1,
        "DP > 1": parallelism.data_parallel > 1,
        "TP > 1 or CP > 1": parallelism.tensor_parallel > 1 or parallelism.context_parallel > 1,
    }[condition]


def _show_more_gpus(key: str, value: str, parallelism: Parallelism) -> str:
    """The value; CUDA_VISIBLE_DEVICES with as many GPUs as the run has ranks per node, if the set has fewer."""
    if (
        key == "CUDA_VISIBLE_DEVICES"
        and parallelism.accelerator == "gpu"
        and len(value.split(",")) < parallelism.devices
    ):
        return ",".join(map(str, range(parallelism.devices)))
    return value


def _check_values(values: Mapping[str, str]) -> None:
    """Refuse values that would fail hours later, or have no effect without any message."""
    timeout = values.get(TIMEOUT_KEY, "600")
    if not re.fullmatch(r"\d{1,6}", timeout) or int(timeout) < 1:
        raise UserError(
            f"{TIMEOUT_KEY} is not a number of seconds",
            expected="whole seconds, 1 or more",
            found=repr(timeout),
            do=f"{TIMEOUT_KEY}=600",
        )
    if values.get(BACKEND_KEY, "nccl") not in ("nccl", "gloo"):
        raise UserError(
            f"{BACKEND_KEY} is not a backend",
            expected="nccl or gloo",
            found=repr(values[BACKEND_KEY]),
            do=f"unset {BACKEND_KEY}",
        )
    if values.get("NCCL_ENABLE_FAULT_TOLERANCE") == "1":
        if values.get("NCCL_PASS_SM") == "1":
            raise UserError(
                "VCCL's two modes exclude each other",
                expected="NCCL_PASS_SM=1 (--env +vccl) or NCCL_ENABLE_FAULT_TOLERANCE=1 (--env +vccl-ft)",
                found="both are 1",
                do="choose one, and unset the other in your shell",
            )
        if not values.get("NCCL_IB_HCA"):
            raise UserError(
                "VCCL's fault tolerance needs the names of the NICs",
                expected="NCCL_IB_HCA=mlx5_0:1,mlx5_1:1,... (your cluster's; see `ibstat`)",
                found="NCCL_IB_HCA is not set",
                do="export NCCL_IB_HCA=..., or NCCL_ENABLE_FAULT_TOLERANCE=0",
            )


def collective_timeout_s(environ: Mapping[str, str]) -> int:
    """Seconds after which a collective gives up waiting for another rank."""
    return int(environ.get(TIMEOUT_KEY, BASE[TIMEOUT_KEY][0]))


def hang_limit_s(environ: Mapping[str, str]) -> float:
    """Seconds without a sign of progress that are never too long: an error that names a lost rank must come first."""
    return 1.5 * collective_timeout_s(environ)


def restart_with_preloads(settings: Sequence[Setting], before: Mapping[str, str]) -> None:
    """Start this command again if a library has to be loaded before all others; does not return then.

    The dynamic linker reads LD_PRELOAD and LD_LIBRARY_PATH only when a process starts. The new process gets the
    environment that this one started with, and these two variables.

    Args:
        before: the environment as it was before `apply_environment`.
    """
    wanted = {s.key: s.value for s in settings if s.key in vccl.PRELOADS}
    if all(before.get(key) == value for key, value in wanted.items()):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**before, **wanted})


def export_lines(settings: Sequence[Setting]) -> list[str]:
    """Shell lines that export the settings, safely quoted; those that need a certain parallelism are comments."""
    return [
        ("# " if s.only_if else "")
        + f"export {s.key}={shlex.quote(s.value)}  # {s.source}: {s.reason}"
        + (f" (only with {s.only_if})" if s.only_if else "")
        for s in settings
    ]
