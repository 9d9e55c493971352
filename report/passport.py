"""The passport of a run: is what was trained what the recipe says? Reads the run directory only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import write_atomic
from common.rundir import RUNS, find_run
from recipes.merge_weights import SHAPES, merge_weights
from recipes.plan import Shape
from recipes.qwen25 import QWEN25_500M
from report.analysis import compute_changes
from report.corpus_hashes import check_corpora
from report.item import Item, State
from report.ledger import check_ledger
from report.read import RunFiles, at, finite, read_run

if TYPE_CHECKING:
    from rich.table import Table

STYLES: dict[State, str] = {"pass": "green", "fail": "bold red", "unknown": "yellow", "not applicable": "dim"}

RELEASED = {"Qwen2.5-0.5B": QWEN25_500M}  # a run of these layers, hidden size and heads is compared with it
SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")

# a file may state a tighter bound than these, never a wider one
STEP0_BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2}
EXPORT_BOUNDS = {"float32": 1e-4}


@dataclass(frozen=True)
class Passport:
    """All items of one run."""

    run: str
    path: Path
    items: tuple[Item, ...]

    def ok(self, strict: bool = False) -> bool:
        """No item failed; with `strict` none is unknown either (edited code, missing files, unchecked export)."""
        return not any(i.state == "fail" or (strict and i.state == "unknown") for i in self.items)

    def exit_code(self, strict: bool = False) -> int:
        """1 if `strict` and an item failed or is unknown, else 0."""
        return int(strict and not self.ok(strict=True))

    def save(self) -> Path:
        """Write passport.json into the run directory."""
        content = {
            "run": self.run,
            "ok": self.ok(),
            "ok_strict": self.ok(strict=True),
            "items": [asdict(item) for item in self.items],
        }
        write_atomic(self.path, json.dumps(content, indent=1) + "\n")
        return self.path

    def table(self) -> Table:
        """A table for the terminal, one coloured row per item."""
        from rich.table import Table
        from rich.text import Text

        table = Table("item", "state", "expected", "found", title=Text(f"passport of {self.run}"))
        for item in self.items:
            state = Text(item.state, style=STYLES[item.state])
            table.add_row(item.name, state, Text(item.expected), Text(item.found))
        return table


def make_passport(run: str | Path, *, quick: bool = False, root: Path = RUNS) -> Passport:
    """Check a run against its own records.

    Args:
        run: NAME or runs/NAME.
        quick: do not read the corpora's .bin and .idx (their item is then unknown at best).
        root: folder of runs.

    Raises:
        UserError: there is no such run.
    """
    return check_files(read_run(find_run(run, root)), quick=quick)


def check_files(files: RunFiles, *, quick: bool = False) -> Passport:
    """The passport of a run whose files have been read."""
    items = (_gates(files), *_model(files), _tokenizer(files), *_loss_mask(files), _documents(files), _step0(files))
    items = (*items, _data(files, quick), _changes(files), *check_ledger(files))
    items = (*items, *_origin(files), _version(files.version), _export(files))
    return Passport(files.run.name, files.run.path / "passport.json", items)


def _gates(files: RunFiles) -> Item:
    """The truth gates ran (training/gates.py); a run started with --no-gates fails here."""
    name, expected = "truth gates", "checked on the objects that train, before the first step"
    if at(files.records.get("spec.json", {}), "gates") is False:
        return Item(name, "fail", expected, "left out with --no-gates: nothing proves what was trained")
    if "gates.json" not in files.records:
        return Item(name, "unknown", expected, "gates.json does not exist")
    return Item(name, "pass", expected, "passed")


def _item(name: str, passed: bool, expected: str, found: str) -> Item:
    return Item(name, "pass" if passed else "fail", expected, found)


def _format_count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else repr(value)


def _model(files: RunFiles) -> Iterator[Item]:
    """Architecture and tied embeddings: the configuration beside what the training process counted."""
    gates = files.records.get("gates.json", {})
    config = {key: files.at(f"model.config.{key}") for key in SHAPE}
    tied = files.at("model.config.share_embeddings_and_output_weights")
    if not all(isinstance(v, int) and v > 0 for v in config.values()) or not isinstance(tied, bool):
        yield Item("architecture", "unknown", "a complete model.config in config.yaml", "numbers are missing")
        yield Item("tied embeddings", "unknown", "model.config in config.yaml", "not recorded")
        return
    name, shape = _expected_shape(Shape(**config, tied=tied))
    expected, trained = f"{shape.num_parameters:,} parameters" + name, gates.get("parameters")
    other = [f"{k} {v} instead of {config[k]}" for k, v in _seen(gates).items() if k in config and v != config[k]]
    if trained is None:
        yield Item("architecture", "unknown", expected, "not recorded in gates.json")
    else:
        matches = trained == shape.num_parameters and not other
        yield _item("architecture", matches, expected, ", ".join([f"{_format_count(trained)} parameters", *other]))
    wanted = "tied" if shape.tied else "untied"
    if not isinstance(gates.get("tied"), bool):
        yield Item("tied embeddings", "unknown", wanted, "not recorded in gates.json")
    else:
        found = "tied" if gates["tied"] else "untied"
        yield _item("tied embeddings", gates["tied"] == tied == shape.tied, wanted, found)


def _expected_shape(shape: Shape) -> tuple[str, Shape]:
    """The released model with this many layers, hidden size and heads, and its name; else the configuration's shape."""
    for name, released in RELEASED.items():
        keys = ("num_layers", "hidden_size", "num_attention_heads")
        if all(getattr(shape, key) == getattr(released, key) for key in keys):
            return f" ({name})", released
    return "", shape


def _seen(gates: dict[str, Any]) -> dict[str, Any]:
    """The shape as the training process recorded it."""
    model = gates.get("model")
    vocab = {"vocab_size": gates["vocab_size"]} if "vocab_size" in gates else {}
    return {**(model if isinstance(model, dict) else {}), **vocab}


def _tokenizer(files: RunFiles) -> Item:
    """The model and every corpus have the same tokenizer."""
    gates = files.records.get("gates.json", {})
    name, model = "tokenizer", gates.get("tokenizer_fingerprint")
    corpora, recorded = gates.get("manifest_fingerprints"), files.records.get("data.json", {})
    checks = list(corpora.items()) if isinstance(corpora, dict) else []
    checks += [(folder, at(manifest, "tokenizer.fingerprint")) for folder, manifest in recorded.items()]
    if not isinstance(model, str) or not checks:
        return Item(name, "unknown", "the same fingerprint in model and corpora", "not recorded")
    wrong = sorted({f"{folder}: {str(fp)[:16]}" for folder, fp in checks if fp != model})
    folders = len({folder for folder, _ in checks})
    return _item(
        name,
        not wrong,
        f"fingerprint {model[:16]} in every corpus",
        "; ".join(wrong) or f"the same in {folders} corpus folder{'s' if folders > 1 else ''}",
    )


def _loss_mask(files: RunFiles) -> Iterator[Item]:
    """The prediction of end of document is in the loss unless the configuration masks it; all others always are."""
    gates = files.records.get("gates.json", {})
    isolated = bool(files.at("data.isolate_documents", False))
    masked = isolated or bool(files.at("data.eod_mask_loss", False))
    in_loss, share = gates.get("eod_in_loss"), finite(gates.get("loss_mask_share"))
    asked_by = "data.isolate_documents" if isolated else "data.eod_mask_loss"
    wanted = f"masked, as {asked_by} asks" if masked else f"token {gates.get('eod', '?')} is in the loss"
    if in_loss is None:
        yield Item("end of document", "unknown", wanted, "not recorded in gates.json")
    else:
        found = "in the loss" if in_loss else "not in the loss"
        yield _item("end of document", in_loss is (not masked), wanted, found)
    wanted = "over 50%: all tokens but end of document" if masked else "100% of tokens are in the loss"
    if "loss_mask_share" not in gates:
        yield Item("loss mask", "unknown", wanted, "not recorded in gates.json")
    else:
        matches = share is not None and (0.5 < share <= 1.0 if masked else share == 1.0)
        yield _item(
            "loss mask", matches, wanted, f"{gates['loss_mask_share']:.4%}" if share is not None else "no number"
        )


def _documents(files: RunFiles) -> Item:
    """Whether documents attend to each other, as the gate of the run recorded it (none could be isolated before it)."""
    gates, asked = files.records.get("gates.json"), bool(files.at("data.isolate_documents", False))
    words = {True: "isolated", False: "attend to each other, as in Qwen's pretraining"}
    if gates is None:
        return Item("documents", "unknown", words[asked], "not recorded in gates.json")
    found = bool(gates.get("documents_isolated", False))
    return _item("documents", found == asked, words[asked], words[found])


def _step0(files: RunFiles) -> Item:
    name, record = "step-0 loss", files.records.get("step0.json")
    if not files.continued:
        return Item(name, "not applicable", "equal to Hugging Face's", "this run started from scratch")
    if record is None:
        return Item(name, "unknown", "equal to Hugging Face's", "step0.json does not exist")
    ours, theirs = finite(record.get("megatron_loss")), finite(record.get("hf_loss"))
    dtype = str(record.get("dtype"))
    bound = _bound(record, STEP0_BOUNDS)
    expected = f"within {bound:g} of Hugging Face on the same tokens ({dtype})"
    if ours is None or theirs is None:
        return Item(name, "fail", expected, "no finite losses in step0.json")
    tokens = _format_count(record.get("tokens"))
    found = f"{ours:.6f} beside {theirs:.6f}, a difference of {abs(ours - theirs):.1e}, on {tokens} tokens"
    return _item(name, abs(ours - theirs) <= bound, expected, found)


def _bound(record: dict[str, Any], limits: dict[str, float]) -> float:
    """The bound in the record, but never a wider one than its dtype allows."""
    stated, limit = finite(record.get("bound")), limits.get(str(record.get("dtype")))
    return min((value for value in (stated, limit) if value is not None), default=0.0)


def _data(files: RunFiles, quick: bool) -> Item:
    name, expected = "data", "the .bin and .idx files of the recorded manifests"
    manifests = files.records.get("data.json")
    if not manifests:
        return Item(name, "unknown", expected, "data.json does not exist")
    checked = check_corpora(manifests, files.run.path.parent.parent, quick)
    if checked.differences:
        return Item(name, "fail", expected, "; ".join(checked.differences))
    if checked.missing:
        return Item(name, "unknown", expected, "missing: " + ", ".join(checked.missing))
    if quick:
        return Item(name, "unknown", expected, "not read; `launch.py passport` reads them")
    return Item(name, "pass", expected, f"SHA-256 of {checked.files} files unchanged")


def _changes(files: RunFiles) -> Item:
    """What was learned and forgotten is measured on the same documents before and after, with a standard error."""
    name, expected = "learned and forgotten", "the same documents validated at the start and last, with standard errors"
    changes = compute_changes(files)
    if not changes:
        return Item(name, "not applicable", expected, "no validation is recorded")
    if unpaired := [change.domain for change in changes if not change.paired and change.step != change.base_step]:
        return Item(name, "unknown", expected, "no paired standard error is recorded for " + ", ".join(unpaired))
    return Item(name, "pass", expected, "; ".join(f"{c.domain} {c.text} nats {c.verdict}" for c in changes))


def _origin(files: RunFiles) -> Iterator[Item]:
    """A fork or a merge: which checkpoints, and of a merge whether their weights are those of its shape."""
    if "origin.json" not in files.records:
        return
    name, origin = "origin", files.origin
    if origin is None:
        yield Item(name, "fail", "the checkpoints that it was made of", "origin.json cannot be read")
        return
    expected, right = "the checkpoint that it was forked from", True
    if origin.kind == "merge":
        expected = f"the checkpoints that were merged, with {origin.shape} weights"
        right = origin.shape in SHAPES and list(origin.weights) == merge_weights(origin.steps, origin.shape)
    yield _item(name, right, expected, origin.describe() + ("" if right else ": not the weights of that shape"))


def _version(version: str) -> Item:
    """Uncommitted changes make the version unknown, which --strict does not accept."""
    expected, commit = "a git commit without local changes", version.removesuffix("+changes")
    if not version or version == "unknown":
        return Item("code version", "unknown", expected, "not recorded" if not version else "not in a git repository")
    if version != commit:
        return Item("code version", "unknown", expected, f"{commit[:12]} with uncommitted changes")
    return Item("code version", "pass", expected, commit[:12])


def _export(files: RunFiles) -> Item:
    name, record = "export", files.records.get("export.json")
    expected = "the exported model gives the same logits"
    if record is None:
        if not files.continued:
            return Item(name, "not applicable", expected, "this run started from scratch and was not exported")
        return Item(name, "unknown", expected, "not exported yet")
    logits, parameters = finite(record.get("max_abs_logits")), finite(record.get("max_abs_parameters"))
    bound = _bound(record, EXPORT_BOUNDS)
    expected = f"the same logits within {bound:g} ({record.get('dtype')})"
    if logits is None:
        return Item(name, "fail", expected, "no finite max_abs_logits in export.json")
    matches = record.get("ok") is True and logits <= bound
    apart = f", parameters {parameters:.2g}" if parameters is not None else ""
    checkpoint = Path(str(record.get("checkpoint", "?"))).name
    return _item(name, matches, expected, f"{checkpoint}: logits differ by {logits:.2g}{apart}")
