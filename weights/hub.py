"""A model on the Hugging Face hub -> a directory on this machine, through huggingface_hub and its cache.

The package is an optional extra, imported when a hub id is asked for. What the cache holds in full is used without a look
at the network.
"""

from pathlib import Path

from nanokv.errors import CheckpointError
from nanokv.hub import hub_error, hub_package
from weights.huggingface import CONFIG, GENERATION, MERGES, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, VOCAB, missing_files
from weights.tensors import INDEX

FILES = [CONFIG, GENERATION, "*.safetensors", INDEX, VOCAB, MERGES, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE]
IN_FOLDERS = ["*/*"]  # other exports of the same model live in subfolders


def fetch(repo_id: str) -> Path:
    """The directory of `repo_id`'s newest revision in the local cache, after downloading what is not there.

    Raises CheckpointError: huggingface_hub is not installed, nothing is cached and the hub cannot be reached, there is no
    such repository, or it holds no model that can be loaded.
    """
    hub = hub_package(repo_id, ", or name a directory")

    def snapshot(local: bool) -> Path:
        return Path(hub.snapshot_download(repo_id, allow_patterns=FILES, ignore_patterns=IN_FOLDERS, local_files_only=local))

    try:
        cached = snapshot(local=True)
        if not missing_files(cached):
            return cached
    except hub.errors.LocalEntryNotFoundError:
        pass
    try:
        directory = snapshot(local=False)
    except Exception as reason:
        raise hub_error(repo_id, reason) from None
    if missing := missing_files(directory):
        raise CheckpointError(
            f"{repo_id!r} comes without {', '.join(missing)}: the hub cannot be reached, or it is no model in safetensors files"
        )
    return directory
