"""Gates: checks before step 1 on the objects that will train, because a configuration can say something else."""

# NeMo-Run reads the constructor's types: no `from __future__ import annotations`, `Optional` instead of `X | None`

import json
import logging
from collections.abc import Iterator
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from nemo.utils.get_rank import is_global_rank_zero

from common.errors import GateError
from common.rundir import RunDir
from data.tokenizer import fingerprint
from training import isolation_gate, step0
from training.global_totals import count_parameters
from training.resumed_loss import check_resumed_loss

log = logging.getLogger("launch")

# (layers, hidden, heads) of the Qwen2.5 sizes that tie input and output embeddings (their HF config.json)
TIED_SHAPES = {(24, 896, 14): "0.5B", (28, 1536, 12): "1.5B", (36, 2048, 16): "3B"}
_NUM_PROBES = 64  # samples read per check; the stock loss mask is wrong from the second sample on


class TruthGates(pl.Callback):
    """Raises GateError before step 1 if the run would not train exactly what its recipe says.

    Args:
        run_dir: the run directory runs/NAME, for gates.json and step0.json. The launcher sets it. Without it nothing is
            written, and the loss is not compared with the base model's.
    """

    def __init__(self, run_dir: Optional[str] = None) -> None:
        self.run = RunDir.at(run_dir) if run_dir else None
        self._resumed_at: Optional[int] = None  # until the first step after it
        self._samples: list[dict[str, torch.Tensor]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        data = trainer.datamodule
        check_lengths(data.seq_length, pl_module.config.seq_length)
        check_tokenizers(data.tokenizer, pl_module.tokenizer, data.domains)
        check_special_ids(data.tokenizer, pl_module.config.vocab_size)
        check_tied(pl_module.config)
        check_stage_messages(pl_module.config)
        isolation_gate.check_set_up(data, pl_module.config)
        samples = list(probe_samples(data._train_ds))
        check_ids(samples, pl_module.config.vocab_size)
        self.mask_share = check_loss_mask(samples, data.tokenizer.eod, data.eod_mask_loss)
        self._samples = [sample for sample, _ in samples]
        if is_global_rank_zero():
            share = 100 * self.mask_share
            log.info("gates: tokenizer, ids, embeddings and loss mask are right (%.2f%% of tokens carry loss)", share)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parameters = count_parameters(trainer.strategy.model)
        samples, self._samples = self._samples, []
        if getattr(trainer.datamodule, "isolate_documents", False):
            isolation_gate.check_isolation(trainer, samples, pl_module.config.vocab_size)
        if self.run is None:
            return
        if is_global_rank_zero():
            _write_facts(self.run, trainer.datamodule, pl_module.config, parameters, self.mask_share)
        if trainer.global_step == 0 and self.run.base.exists():
            step0.check_step0(trainer, json.loads(self.run.base.read_text())["source"], self.run)
        self._resumed_at = trainer.global_step or None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare the first loss of a resumed run with the last ones before (reads it from the GPU, once)."""
        start, self._resumed_at = self._resumed_at, None
        metrics = trainer.callback_metrics
        if start is not None and self.run is not None and trainer.is_global_zero and "reduced_train_loss" in metrics:
            norm = metrics.get("grad_norm")
            loss = float(metrics["reduced_train_loss"])
            ledger = getattr(trainer.datamodule, "ledger", None)
            since = 0 if ledger is None else ledger.stage_at(start).first
            check_resumed_loss(self.run, start, loss, None if norm is None else float(norm), since)


def _write_facts(run: RunDir, data: Any, config: Any, parameters: int, mask_share: float) -> None:
    """Write gates.json: facts of the objects that train, which the passport compares with the configuration."""
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
    facts = {
        "parameters": parameters,
        "tied": bool(config.share_embeddings_and_output_weights),
        "model": {name: getattr(config, name) for name in names},
        "vocab_size": config.vocab_size,
        "tokenizer_fingerprint": fingerprint(data.tokenizer.tokenizer),
        "manifest_fingerprints": {
            data.domain_folders[name]: m.tokenizer.fingerprint for name, m in data.domains.items()
        },
        "eod": data.tokenizer.eod,
        "eod_in_loss": not data.eod_mask_loss,  # check_loss_mask has compared labels and mask with the .bin
        "loss_mask_share": mask_share,
        "documents_isolated": bool(getattr(data, "isolate_documents", False)),  # then check_isolation has proven it
    }
    run.gates.write_text(json.dumps(facts, indent=1) + "\n")


def probe_samples(dataset: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Yield (sample, its ids as stored in the .bin) for up to `_NUM_PROBES` training samples.

    All samples of a domain are read through one dataset object, and a blend is read domain by domain. Tensors are
    cloned at once: the stock dataset returns the same mask tensor each time, and sets parts of it to zero in place.
    """
    parts: list[GPTDataset] = getattr(dataset, "datasets", [dataset])
    for part in parts:
        for index in range(min(len(part), max(1, _NUM_PROBES // len(parts)))):
            sample = {k: v.clone() for k, v in part[index].items() if isinstance(v, torch.Tensor)}
            yield sample, torch.from_numpy(part._query_document_sample_shuffle_indices(index)[0]).long()


def check_lengths(data_seq_length: int, model_seq_length: int) -> None:
    """Check that data and model have the same sequence length; NeMo accepts a mismatch without an error."""
    if data_seq_length != model_seq_length:
        raise GateError(
            "the data's sequence length is not the model's",
            expected=f"data.seq_length = model.config.seq_length = {model_seq_length} tokens",
            found=f"data.seq_length = {data_seq_length} tokens",
            do=f"set both: data.seq_length={data_seq_length} model.config.seq_length={data_seq_length}",
        )


def check_tokenizers(data_tokenizer: Any, model_tokenizer: Any, domains: dict[str, Any]) -> None:
    """Check that each domain was prepared with the tokenizer that the model is given (see its manifest.json)."""
    found = fingerprint(data_tokenizer.tokenizer)
    for name, manifest in domains.items():
        if manifest.tokenizer.fingerprint != found:
            raise GateError(
                f"the corpus {name!r} was made with another tokenizer",
                expected=f"fingerprint {manifest.tokenizer.fingerprint[:16]} ({manifest.tokenizer.source})",
                found=f"fingerprint {found[:16]} ({data_tokenizer.tokenizer.name_or_path})",
                do="leave data.tokenizer unset, so that the corpus's own is used, or prepare the corpus again",
            )
    if model_tokenizer is not data_tokenizer and fingerprint(model_tokenizer.tokenizer) != found:
        raise GateError(
            "model and data have different tokenizers",
            expected=f"fingerprint {found[:16]} in both",
            found=f"the model has {fingerprint(model_tokenizer.tokenizer)[:16]}",
            do="leave model.tokenizer unset: NeMo gives the model the data's",
        )


def check_special_ids(tokenizer: Any, vocab_size: int) -> None:
    """Check that all ids of the tokenizer are in the embedding table, and that it has an end-of-document id."""
    size = len(tokenizer.tokenizer)
    if size > vocab_size:
        raise GateError(
            "the tokenizer is larger than the model's vocabulary",
            expected=f"at most {vocab_size} ids (model.config.vocab_size)",
            found=f"{size} ids in {tokenizer.tokenizer.name_or_path}",
            do=f"set model.config.vocab_size to at least {size}, or prepare the corpus with the model's tokenizer",
        )
    if tokenizer.eod is None or not 0 <= tokenizer.eod < size:
        raise GateError(
            "the tokenizer has no end-of-document id",
            expected=f"eos_token set, id below {size}",
            found=f"eod = {tokenizer.eod}",
            do="set eos_token in tokenizer_config.json (Qwen2.5 base: <|endoftext|>)",
        )


def check_tied(config: Any) -> None:
    """Check that a model of the size of Qwen2.5 0.5B, 1.5B or 3B has tied embeddings; NeMo's configs untie them."""
    size = TIED_SHAPES.get((config.num_layers, config.hidden_size, config.num_attention_heads))
    if size and not config.share_embeddings_and_output_weights:
        raise GateError(
            f"untied embeddings on the shape of Qwen2.5-{size}",
            expected="model.config.share_embeddings_and_output_weights=True, as the released weights are",
            found="False, another architecture: released weights do not fit it, and its export is a larger model",
            do="set model.config.share_embeddings_and_output_weights=True",
        )


def check_stage_messages(config: Any) -> None:
    """Check that two pipeline ranks with virtual stages do not batch their messages.

    The two ranks are each other's next and previous stage. A batch of two sends between them is matched by its order,
    so that the messages arrive swapped and the gradients are wrong without an error. Megatron-LM's argument check
    refuses this; NeMo has no such check. Test: tests/training/distributed/test_parallel.py.
    """
    two_ranks = config.pipeline_model_parallel_size == 2 and config.virtual_pipeline_model_parallel_size
    if two_ranks and (config.batch_p2p_comm or not config.overlap_p2p_comm):
        raise GateError(
            "two pipeline stages with virtual stages would exchange each other's messages",
            expected="model.config.overlap_p2p_comm=True model.config.batch_p2p_comm=False",
            found=f"{config.overlap_p2p_comm} and {config.batch_p2p_comm}",
            do="add both to the command, or use more pipeline stages",
        )


def check_ids(samples: list[tuple[dict[str, torch.Tensor], torch.Tensor]], vocab_size: int) -> None:
    """Check that token ids are in the vocabulary and reach the model as they are stored in the .bin."""
    for sample, stored in samples:
        low, high = int(stored.min()), int(stored.max())
        if low < 0 or high >= vocab_size:
            raise GateError(
                "token ids outside the model's vocabulary",
                expected=f"0 <= id < {vocab_size}",
                found=f"ids from {low} to {high} in the training data",
                do="prepare the corpus with the model's own tokenizer",
            )
        if not torch.equal(sample["labels"], stored[1:]) or not torch.equal(sample["tokens"], stored[:-1]):
            changed = int((sample["labels"] != stored[1:]).sum())
            raise GateError(
                "the dataset rewrites token ids",
                expected="labels as they are stored in the .bin",
                found=f"{changed} of {stored.numel() - 1} labels of one sample changed",
                do="leave data.dataset_cls at data.datasets.WholeMaskGPTDataset (docs/truth.md)",
            )


def check_loss_mask(
    samples: list[tuple[dict[str, torch.Tensor], torch.Tensor]], eod: int, eod_mask_loss: bool
) -> float:
    """Check that every token carries loss, except those predicted from end-of-document if `eod_mask_loss`.

    Args:
        samples: what `probe_samples` yields.
        eod: the end-of-document id.

    Returns:
        the share of tokens that carry loss, 0 to 1.
    """
    kept = total = 0
    for index, (sample, _) in enumerate(samples):
        mask, tokens = sample["loss_mask"], sample["tokens"]
        wanted = (tokens != eod).float() if eod_mask_loss else torch.ones_like(mask)
        if not torch.equal(mask, wanted):
            raise GateError(
                "the loss mask is wrong",
                expected=f"{int(wanted.sum())} of {mask.numel()} tokens of sample {index} in the loss",
                found=f"{int(mask.sum())}",
                do="leave data.dataset_cls at data.datasets.WholeMaskGPTDataset (docs/truth.md)",
            )
        kept += int(mask.sum())
        total += mask.numel()
    return kept / total
