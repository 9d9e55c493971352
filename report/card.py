"""README.md of an exported model: YAML front matter for the hub, and what the run's own records say about the training.

The front matter and the text outside the two marker lines are the user's: writing the card again keeps both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from common.files import write_atomic
from common.hub import is_hub_id
from common.rundir import RUNS, RunDir
from data.prepare.input_files import HUB
from report.analysis import Progress, compute_changes, compute_tokens, get_progress, planned_replay_share
from report.configuration import configuration_tables
from report.evaluation.comparison import RULE
from report.evaluation.result import RESULT, Evaluation, find_exporting_run, newest_evaluation, read_evaluation
from report.front_matter import read_front_matter
from report.page import NONE, decimal, percent, short, signed
from report.passport import check_files
from report.read import RunFiles, read_run

CARD = "README.md"
BEGIN = "<!-- begin: written by launch.py card; text outside of begin and end is kept -->"
END = "<!-- end: written by launch.py card -->"
FILL_IN = "fill-in"  # no license and no language has this name: `push` refuses it, and so does the hub
_COMMENTS = {
    "license": "yours to choose; the licenses of base_model and of your text bind you",
    "language": "codes such as en and zh",
    "base_model": "the hub id of the model that this one started from",
}
_HUB_SOURCE = re.compile(rf"{HUB}([\w.-]+/[\w.-]+)")


def write_card(
    folder: Path, run: RunDir | None = None, front_matter: Mapping[str, Any] | None = None, root: Path = RUNS
) -> Path:
    """Write or renew the model card of an exported folder: the run as it was when the exported checkpoint was saved.

    Args:
        run: the run that it was exported from; default: the one whose export.json names the folder.
        front_matter: fields to set, such as license="apache-2.0"; the others stay as the card has them.
        root: folder of runs.

    Returns:
        the path of README.md.

    Raises:
        UserError: the folder is no exported model, or the front matter of its README.md cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} is no exported model",
            expected="a Hugging Face folder with config.json",
            found="a folder without it" if folder.is_dir() else "no such folder",
            do="python launch.py convert export RUN models/mine",
        )
    run = run or find_exporting_run(folder, root)
    files = read_run(run) if run is not None else None
    path = folder / CARD
    old = path.read_text() if path.is_file() else ""
    written, around = read_front_matter(old, path)
    front = {**_front_matter(files), **written, **(front_matter or {})}
    write_atomic(path, _front_text(front) + _replace_block(around, folder.name, _body(folder, files)))
    return path


def _front_matter(files: RunFiles | None) -> dict[str, Any]:
    """What the hub's search and widgets read (its page "Model Cards")."""
    base = str(files.records.get("base.json", {}).get("source", "")) if files else ""
    front: dict[str, Any] = {"license": FILL_IN, "library_name": "transformers", "pipeline_tag": "text-generation"}
    if base:
        front["base_model"] = base if is_hub_id(base) else FILL_IN
        front["base_model_relation"] = "finetune"
    if data := _hub_data_sets(files):
        front["datasets"] = data
    front["language"] = FILL_IN
    front["tags"] = ["continual-pretraining" if base else "pretraining", "qwen2", "nemo"]
    return front


def _hub_data_sets(files: RunFiles | None) -> list[str]:
    """The data sets of the hub that the corpora were made from: the hub makes links of them, own files have none."""
    manifests = files.records.get("data.json", {}).values() if files else []
    paths = [str(source.get("path", "")) for manifest in manifests for source in manifest.get("sources", [])]
    return sorted({match[1] for path in paths if (match := _HUB_SOURCE.match(path))})


def _front_text(front: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True)
    for name, comment in _COMMENTS.items():
        text = text.replace(f"{name}: {FILL_IN}\n", f"{name}: {FILL_IN}  # {comment}\n")
    return f"---\n{text}---\n"


def _replace_block(text: str, name: str, body: str) -> str:
    """The text with its block between the markers replaced; a card without markers gets the block at its end."""
    block = f"{BEGIN}\n{body.strip()}\n{END}\n"
    start, end = text.find(BEGIN), text.find(END)
    if start >= 0 and end > start:
        return text[:start] + block + text[end + len(END) :].removeprefix("\n")
    return (text.rstrip() + "\n\n" if text.strip() else f"\n# {name}\n\nWhat this model is for: fill in.\n\n") + block


def _body(folder: Path, files: RunFiles | None) -> str:
    """The part that is written from the records."""
    found = read_evaluation(folder / RESULT)
    if files is None:
        parts = ["The run that this model came from is not on the machine where this card was written."]
        return "\n\n".join(parts + ([evaluation_section(found)] if found else []))
    step = _exported_step(folder, files)
    found = found or (newest_evaluation(files.run) if step is None else read_evaluation(files.run.evaluation(step)))
    now = files if step is None else _cut(files, step)
    sections = [_training(now, step), _validation(now), evaluation_section(found) if found else "", _passport(files)]
    return "\n\n".join(section for section in [*sections, _reproduce(files)] if section)


def _exported_step(folder: Path, files: RunFiles) -> int | None:
    """The step of the checkpoint that the folder was exported from; None where the run's newest export is another."""
    record = files.records.get("export.json", {})
    output, name = str(record.get("output", "")), Path(str(record.get("checkpoint", ""))).name
    if Path(output).resolve() != folder.resolve() or not re.fullmatch(r"step-\d+", name):
        return None
    return int(name.removeprefix("step-"))


def _cut(files: RunFiles, step: int) -> RunFiles:
    """The run as it was at this step."""
    train, validation = ([row for row in rows if row["step"] <= step] for rows in (files.train, files.validation))
    return dataclasses.replace(files, train=train, validation=validation)


def _named(model: str) -> str:
    """A hub id or a path within the project as it is; of another path, which is this machine's, the last part."""
    return Path(model).name if Path(model).expanduser().is_absolute() else model


def table(columns: list[str], rows: list[list[str]], *, numbers: bool = True) -> str:
    """A Markdown table.

    Args:
        numbers: align all columns but the first to the right.
    """
    lines = [columns, ["---", *["---:" if numbers else "---"] * (len(columns) - 1)], *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def _training(files: RunFiles, step: int | None) -> str:
    base = _named(str(files.records.get("base.json", {}).get("source", "")))
    lines = ["## Training", f"Continued pretraining of `{base}`, all parameters." if base else "Trained from scratch."]
    progress = get_progress(files)
    if step is not None:  # what is logged may end a few steps before a checkpoint
        progress = Progress(step, progress.planned, failed=False)
    lines.append(f"Recipe `{files.records.get('spec.json', {}).get('recipe', NONE)}`: {progress}.")
    shown = configuration_tables(files)
    rows = [[name, value] for title in ("Batch", "Schedule") for name, value in shown.get(title, [])]
    if rows:
        lines.append(table(["", "value"], rows, numbers=False))
    if tokens := compute_tokens(files):
        columns = ["domain", "role", "tokens", "share", "epochs"]
        cells = [
            [t.domain, t.role, short(t.consumed), percent(t.consumed_share), decimal(t.consumed_epochs, 2)]
            for t in tokens
        ]
        lines.append(table(columns, cells))
        if (share := planned_replay_share(files)) is not None:
            lines.append(f"Replay (text like what the base was trained on): {percent(share)} of the tokens, planned.")
    return "\n\n".join(lines)


def _validation(files: RunFiles) -> str:
    changes = compute_changes(files)
    if not changes:
        return ""
    start = "base" if files.continued else "start"
    columns = ["domain", start, "now", "difference", f"bits per byte, {start}", "now"]
    rows = [
        [c.domain, decimal(c.base), decimal(c.now), signed(c.delta, 3), *(decimal(bits) for bits in c.bits_per_byte)]
        for c in changes
    ]
    about = f"Loss in nats per token on text that was left out, at step {changes[0].step:,}; below zero is learned."
    return "\n\n".join(["## Validation, before and after", about, table(columns, rows)])


def evaluation_section(found: Evaluation) -> str:
    """The evaluation as Markdown."""
    compared = found.base is not None
    columns = ["task", "metric", "items", *(["base"] if compared else []), "model"]
    columns += ["difference", "±", ""] if compared else ["±"]
    rows = []
    for row in found.rows:
        cells = [f"`{row.task}`", row.metric, f"{row.items:,}", *([decimal(row.base, 4)] if compared else [])]
        cells += [decimal(row.value, 4), *([signed(row.difference, 4)] if compared else [])]
        cells += [
            decimal(row.paired_error if compared else row.standard_error, 4),
            *([row.verdict] if compared else []),
        ]
        rows.append(cells)
    how = f"{found.how.get('harness', 'lm_eval')}, {found.how.get('dtype')}, on {found.how.get('device')}"
    about = f"Scored with the lm-evaluation-harness ({how})."
    about += (
        f" Beside `{_named(str(found.base))}` on the same items; ± is the paired standard error. {RULE}."
        if compared
        else ""
    )
    return "\n\n".join(
        ["## Evaluation, before and after" if compared else "## Evaluation", about, table(columns, rows)]
    )


def _passport(files: RunFiles) -> str:
    """The passport's items; the corpora are not read again for it."""
    items = check_files(files, quick=True).items
    rows = [[item.name, item.state, item.found] for item in items]
    found = table(["item", "state", "found"], rows, numbers=False)
    return "\n\n".join(["## Passport", "What the run's own records prove.", found])


def _reproduce(files: RunFiles) -> str:
    lines = ["## How to reproduce", f"Code version `{files.version or 'unknown'}`."]
    if files.command:
        words = files.command.split(" ", 1)  # the interpreter's path is this machine's
        lines.append(f"```\npython {words[-1]}\n```")
    return "\n\n".join(lines)
