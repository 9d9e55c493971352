"""NeMo's MegatronStrategy, which here compares the ranks first and restores checkpoints as data, also without TE."""

# no `from __future__ import annotations`: NeMo-Run reads the constructor's types to parse overrides

from pathlib import Path
from typing import Any, Union

from megatron.core.dist_checkpointing.mapping import ShardedObject
from nemo import lightning as nl
from nemo.lightning import _strategy_lib
from nemo.lightning.io.pl import ckpt_to_weights_subdir

from common.processes import ignore_stop_signals
from training.checkpoints import StepCheckpoint
from training.distributed.consistency import check_ranks
from training.distributed.lost_ranks import record_step, set_collective_timeout
from training.safe_load import check_extra_states, data_only

WORKER_TIMEOUT_S = 600  # for one batch: a data worker that needs longer is stuck or stopped


class Strategy(nl.MegatronStrategy):
    """Restores a checkpoint that lacks Transformer Engine's `_extra_state` entries.

    Each TE module asks for one such entry (FP8 scales; empty without FP8). A checkpoint written without TE, such as a
    base model imported on a machine without a GPU, has none, and the stock strategy refuses it. Here a missing entry
    stays as the module made it; a missing weight is still an error. Versions: nemo_toolkit 2.3, megatron-core 0.12 to
    0.13. Test: tests/training/test_compat.py.
    """

    def setup_distributed(self) -> None:
        """Make the process groups with the environment's timeout, then compare the ranks before anything else runs."""
        set_collective_timeout()
        super().setup_distributed()
        check_ranks()

    def process_dataloader(self, dataloader: Any) -> Any:
        """NeMo's loader with Megatron's sampler; its workers leave signals to the rank and may not be silent for ever.

        NeMo makes a new loader for the sampler, without the `worker_init_fn` and the `timeout` of the first.
        """
        loader = super().process_dataloader(dataloader)
        if loader.num_workers > 0:
            loader.worker_init_fn = ignore_stop_signals
            loader.timeout = WORKER_TIMEOUT_S
        return loader

    def training_step(self, dataloader_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """One step: zero the gradients, forward and backward of all micro batches, report the loss.

        The stock step also logs `global_step` and `step` as Python numbers. Lightning copies each to the GPU and waits
        for it, and nothing reads them: metrics.jsonl and TensorBoard have the step.
        """
        with self.precision_plugin.train_step_context():
            for chunk in self.model:
                chunk.zero_grad_buffer()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.model.training_step(dataloader_iter, *args, **kwargs)
            _strategy_lib._sync_from_last_pipeline_stage(loss, broadcast=False)
            self.lightning_module.log("reduced_train_loss", loss, batch_size=1, sync_dist=False)
            record_step()
            return loss

    def teardown(self) -> None:
        """Close what the strategy has opened; weights and optimizer state stay where they are until the process ends.

        The stock one copies both from the GPU to host memory, 10 bytes for each parameter on one GPU. Nothing reads
        them there, and the host may not have the memory.
        """
        module: Any = self.lightning_module
        self._lightning_module = None
        self.optimizers: list[Any] = []
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def load_checkpoint(self, checkpoint_path: Union[str, Path], selective_restore: bool = False) -> dict[str, Any]:
        """Restore a checkpoint as data: no code in it is run (training/safe_load.py).

        Raises:
            UserError: a file of the checkpoint holds more than data.
        """
        with data_only(Path(checkpoint_path)):
            checkpoint = self._load_without_missing(checkpoint_path, selective_restore)
        if not (self.lightning_module.config.fp8 and self._is_own(Path(checkpoint_path))):
            check_extra_states(checkpoint["state_dict"], Path(checkpoint_path))
        return checkpoint

    def _is_own(self, checkpoint: Path) -> bool:
        """This run has written the checkpoint.

        The states of FP8 hold tensors, which Transformer Engine unpickles without a restriction: no others are read.
        """
        runs = [one.run for one in self.trainer.callbacks if isinstance(one, StepCheckpoint) and one.run is not None]
        return any(checkpoint.resolve().parent == run.checkpoints.resolve() for run in runs)

    def _load_without_missing(self, checkpoint_path: Union[str, Path], selective_restore: bool) -> dict[str, Any]:
        stored = _stored_keys(ckpt_to_weights_subdir(checkpoint_path, is_saving=False))
        missing: dict[str, Any] = {}
        sharded_state_dict = self.megatron_parallel.sharded_state_dict

        def without_missing(*args: Any, **kwargs: Any) -> Any:
            return _drop_missing(sharded_state_dict(*args, **kwargs), stored, missing)

        self.megatron_parallel.sharded_state_dict = without_missing
        try:
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, selective_restore)
        finally:
            del self.megatron_parallel.sharded_state_dict
        for path, data in missing.items():
            *parents, leaf = path.split("\0")
            parent = checkpoint["state_dict"]
            for name in parents:
                parent = parent[name]
            parent[leaf] = data
        return checkpoint


def _stored_keys(weights: Path) -> set[str]:
    """The names of everything that a distributed checkpoint holds."""
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    return {getattr(entry, "unique_key", key) for key, entry in load_sharded_metadata(str(weights)).items()}


def _drop_missing(tree: Any, stored: set[str], missing: dict[str, Any], path: str = "") -> Any:
    """The state dict `tree` without `_extra_state` objects that are not stored; these go to `missing`, by path."""
    if not isinstance(tree, dict):
        return tree
    kept = {}
    for name, value in tree.items():
        child = f"{path}\0{name}" if path else str(name)
        is_extra_state = isinstance(value, ShardedObject) and value.key.endswith("_extra_state")
        if is_extra_state and value.unique_key not in stored:
            missing[child] = value.data
        else:
            kept[name] = _drop_missing(value, stored, missing, child)
    return kept
