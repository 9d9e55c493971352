"""The passport of a run: does what was trained prove to be what the recipe says? Reads the run directory only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from common.rundir import RUNS, RunDir
from recipes.plan import Shape
from report.passport_data import hash_differences
from report.read import RunFiles, at, finite, open_run, read

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["pass", "fail", "unknown", "not applicable"]
STYLES: dict[State, str] = {"pass": "green", "fail": "bold red", "unknown": "yellow", "not applicable": "dim"}

# (layers, hidden, heads) -> name, trainable parameters as transformers counts them, embeddings tied
RELEASED = {(24, 896, 14): ("Qwen2.5-0.5B", 494_032_768, True)}
SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")

# a file may state a tighter bound than these, never a wider one
STEP0_BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2}
EXPORT_BOUNDS = {"float32": 1e-4}


@dataclass(frozen=True)
class Item:
    """One thing that was checked, with what would have been right and what is there."""

    name: str
    state: State
    expected: str
    found: str


@dataclass(frozen=True)
class Passport:
    """All items of one run."""

    run: str
    path: Path
    items: tuple[Item, ...]

    def ok(self, strict: bool = False) -> bool:
        """No item failed; under `strict` none is unknown either (edited code, missing files, unchecked export)."""
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
        part = self.path.with_suffix(".json.tmp")
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return part.replace(self.path)

    def table(self) -> Table:
        """For the terminal: one coloured row an item."""
        from rich.table import Table
        from rich.text import Text

        table = Table("item", "state", "expected", "found", title=Text(f"passport of {self.run}"))
        for item in self.items:
            state = Text(item.state, style=STYLES[item.state])
            table.add_row(item.name, state, Text(item.expected), Text(item.found))
        return table


def passport(run: RunDir | str, *, quick: bool = False, root: Path = RUNS) -> Passport:
    """Check a run against its own records.

    Args:
        run: its directory, or its name under `root`.
        quick: leave the corpora's .bin/.idx unread (their item is then unknown at best).
        root: folder of runs.

    Raises:
        UserError: there is no such run.
    """
    return of_files(read(open_run(run, root)), quick=quick)


def of_files(files: RunFiles, *, quick: bool = False) -> Passport:
    """The passport of a run that is read already."""
    items = (*_model(files), _tokenizer(files), *_loss_mask(files), _step0(files), _data(files, quick))
    return Passport(files.run.name, files.run.path / "passport.json", (*items, _version(files.version), _export(files)))


def _item(name: str, holds: bool, expected: str, found: str) -> Item:
    return Item(name, "pass" if holds else "fail", expected, found)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else repr(value)


def _model(files: RunFiles) -> Iterator[Item]:
    """Architecture and tied embeddings: the configuration's against what the training process counted."""
    gates = files.records.get("gates.json", {})
    config = {key: files.at(f"model.config.{key}") for key in SHAPE}
    tied = files.at("model.config.share_embeddings_and_output_weights")
    if not all(isinstance(v, int) and v > 0 for v in config.values()) or not isinstance(tied, bool):
        yield Item("architecture", "unknown", "a whole model.config in config.yaml", "some of its numbers are missing")
        yield Item("tied embeddings", "unknown", "model.config in config.yaml", "not recorded")
        return
    key = (config["num_layers"], config["hidden_size"], config["num_attention_heads"])
    name, count, tied_released = RELEASED.get(key, ("", Shape(**config, tied=tied).num_parameters, tied))
    expected, trained = f"{count:,} parameters" + (f" ({name})" if name else ""), gates.get("parameters")
    other = [f"{k} {v} instead of {config[k]}" for k, v in _seen(gates).items() if k in config and v != config[k]]
    if trained is None:
        yield Item("architecture", "unknown", expected, "gates.json does not say")
    else:
        holds = trained == count and not other
        yield _item("architecture", holds, expected, ", ".join([f"{_count(trained)} parameters", *other]))
    wanted = "tied" if tied_released else "untied"
    if not isinstance(gates.get("tied"), bool):
        yield Item("tied embeddings", "unknown", wanted, "gates.json does not say")
    else:
        found = "tied" if gates["tied"] else "untied"
        yield _item("tied embeddings", gates["tied"] == tied == tied_released, wanted, found)


def _seen(gates: dict[str, Any]) -> dict[str, Any]:
    """The shape as the training process wrote it down."""
    model = gates.get("model")
    vocab = {"vocab_size": gates["vocab_size"]} if "vocab_size" in gates else {}
    return {**(model if isinstance(model, dict) else {}), **vocab}


def _tokenizer(files: RunFiles) -> Item:
    """Model, gates and every corpus have one tokenizer."""
    gates = files.records.get("gates.json", {})
    name, model = "tokenizer", gates.get("tokenizer_fingerprint")
    corpora, recorded = gates.get("manifest_fingerprints"), files.records.get("data.json", {})
    checks = list(corpora.items()) if isinstance(corpora, dict) else []
    checks += [(folder, at(manifest, "tokenizer.fingerprint")) for folder, manifest in recorded.items()]
    if not isinstance(model, str) or not checks:
        return Item(name, "unknown", "one fingerprint in model and corpora", "not recorded (gates.json, data.json)")
    wrong = sorted({f"{folder}: {str(fp)[:16]}" for folder, fp in checks if fp != model})
    folders = len({folder for folder, _ in checks})
    return _item(
        name,
        not wrong,
        f"fingerprint {model[:16]} in every corpus",
        "; ".join(wrong) or f"the same in {folders} corpus folder(s)",
    )


def _loss_mask(files: RunFiles) -> Iterator[Item]:
    """End-of-document predictions carry loss unless the configuration masks them; all other tokens always do."""
    gates = files.records.get("gates.json", {})
    masked = bool(files.at("data.eod_mask_loss", False))
    in_loss, share = gates.get("eod_in_loss"), finite(gates.get("loss_mask_share"))
    wanted = "masked, as data.eod_mask_loss asks" if masked else f"token {gates.get('eod', '?')} is learned"
    if in_loss is None:
        yield Item("end of document", "unknown", wanted, "gates.json does not say")
    else:
        found = "in the loss" if in_loss else "not in the loss"
        yield _item("end of document", in_loss is (not masked), wanted, found)
    wanted = "above 50%, all but end of document" if masked else "100% of tokens carry loss"
    if "loss_mask_share" not in gates:
        yield Item("loss mask", "unknown", wanted, "gates.json does not say")
    else:
        holds = share is not None and (0.5 < share <= 1.0 if masked else share == 1.0)
        yield _item("loss mask", holds, wanted, f"{gates['loss_mask_share']:.4%}" if share is not None else "no number")


def _step0(files: RunFiles) -> Item:
    name, record = "step-0 loss", files.records.get("step0.json")
    if not files.continued:
        return Item(name, "not applicable", "equal to Hugging Face's", "this run started from scratch (no base.json)")
    if record is None:
        return Item(name, "unknown", "equal to Hugging Face's", "step0.json is not there")
    ours, theirs = finite(record.get("megatron_loss")), finite(record.get("hf_loss"))
    dtype = str(record.get("dtype"))
    bound = _bound(record, STEP0_BOUNDS)
    expected = f"within {bound:g} of Hugging Face on the same tokens ({dtype})"
    if ours is None or theirs is None:
        return Item(name, "fail", expected, "no finite losses in step0.json")
    found = f"{ours:.6f} against {theirs:.6f}, {abs(ours - theirs):.1e} apart on {_count(record.get('tokens'))} tokens"
    return _item(name, abs(ours - theirs) <= bound, expected, found)


def _bound(record: dict[str, Any], limits: dict[str, float]) -> float:
    """The record's own bound, but never a wider one than its dtype allows."""
    stated, limit = finite(record.get("bound")), limits.get(str(record.get("dtype")))
    return min((value for value in (stated, limit) if value is not None), default=0.0)


def _data(files: RunFiles, quick: bool) -> Item:
    name, expected = "data", "the .bin and .idx that the manifests describe"
    manifests = files.records.get("data.json")
    if not manifests:
        return Item(name, "unknown", expected, "data.json is not there")
    checked = hash_differences(manifests, files.run.path.parent.parent, quick)
    if checked.differences:
        return Item(name, "fail", expected, "; ".join(checked.differences))
    if checked.gone:
        return Item(name, "unknown", expected, "gone: " + ", ".join(checked.gone))
    if quick:
        return Item(name, "unknown", expected, "files not read (quick); `launch.py passport` reads them")
    return Item(name, "pass", expected, f"SHA-256 of {checked.files} files holds")


def _version(version: str) -> Item:
    """Edited code is not known code: unknown, which --strict does not accept."""
    expected, commit = "a git commit without changes", version.removesuffix("+changes")
    if not version or version == "unknown":
        return Item("code version", "unknown", expected, "not recorded" if not version else "outside git")
    if version != commit:
        return Item("code version", "unknown", expected, f"{commit[:12]} with changes that were not committed")
    return Item("code version", "pass", expected, commit[:12])


def _export(files: RunFiles) -> Item:
    name, record = "export", files.records.get("export.json")
    expected = "the exported model gives the same logits"
    if record is None:
        if not files.continued:
            return Item(name, "not applicable", expected, "this run started from scratch and was not exported")
        return Item(name, "unknown", expected, "not exported yet (export.json is not there)")
    logits, parameters = finite(record.get("max_abs_logits")), finite(record.get("max_abs_parameters"))
    bound = _bound(record, EXPORT_BOUNDS)
    expected = f"the same logits within {bound:g} ({record.get('dtype')})"
    if logits is None:
        return Item(name, "fail", expected, "no finite max_abs_logits in export.json")
    holds = record.get("ok") is True and logits <= bound
    apart = f", parameters {parameters:.2g}" if parameters is not None else ""
    checkpoint = Path(str(record.get("checkpoint", "?"))).name
    return _item(name, holds, expected, f"{checkpoint}: logits {logits:.2g} apart{apart}")
