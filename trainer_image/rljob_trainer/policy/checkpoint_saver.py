"""Saves the checkpoints of one rank: at once, or in the background from a copy in the host's memory.

    begin: state --> copy      wait: .-- the copy is written by a thread, next to updates, publishing and inspecting
                                     '-> its error, or what this rank wrote

Invariant: what is written is the state at `begin`, whatever happens to the policy until the write has ended.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from rljob_trainer.policy.checkpoint_storage import CheckpointWriter, first_failure
from rljob_trainer.policy.checkpoints import TRAINER_FOLDER, read_state, save_checkpoint
from rljob_trainer.policy.host_copy import HostCopy
from rljob_trainer.policy.policy import Policy
from rljob_trainer.run_folder.client import RemoteFolder
from rljob_trainer.run_folder.file_facts import FileFacts


class CheckpointSaver:
    def __init__(self, policy: Policy, *, asynchronous: bool) -> None:
        """A collective."""
        self._policy, self._asynchronous = policy, asynchronous
        self._writing: Future[Any] | None = None
        self._files: dict[str, FileFacts] = {}
        if asynchronous:
            # The ranks' threads meet in a separate group: the order of collectives in the others is that of
            # training. gloo, because no part of the copy is on a GPU.
            self._group = dist.new_group(backend="gloo")
            self._copy = HostCopy()

    def begin(self, folder: Path | RemoteFolder) -> None:
        """Return once training may continue: with a copy of what is then written to FOLDER/trainer, or after the write.
        A checkpoint that is still being written is waited for."""
        self.wait()
        if not self._asynchronous:
            self._files = save_checkpoint(self._policy, folder)
            return
        writer = CheckpointWriter(folder / TRAINER_FOLDER)
        self._files = writer.files  # to be filled
        self._writing = cast(
            "Future[Any]",
            async_save(
                read_state(self._policy),
                storage_writer=writer,
                process_group=self._group,
                async_stager=self._copy,
            ),
        )

    def wait(self) -> dict[str, FileFacts]:
        """Wait until the last checkpoint is written by all ranks, and return this rank's files, by name. Raise why it
        was not written, once: the next one may be."""
        if (writing := self._writing) is not None:
            try:
                with first_failure():
                    writing.result()
            finally:
                self._writing = None
        return self._files
