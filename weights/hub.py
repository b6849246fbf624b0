"""A model on the Hugging Face hub -> a directory on this machine, through huggingface_hub and its cache.

The package is an optional extra, imported when a hub id is asked for. What the cache holds in full is used without a look
at the network.
"""

from pathlib import Path

from nanokv.errors import CheckpointError
from weights.huggingface import CONFIG, GENERATION, MERGES, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, VOCAB, missing_files
from weights.tensors import INDEX

FILES = [CONFIG, GENERATION, "*.safetensors", INDEX, VOCAB, MERGES, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE]
IN_FOLDERS = ["*/*"]  # other exports of the same model live in subfolders


def fetch(repo_id: str) -> Path:
    """The directory of `repo_id`'s newest revision in the local cache, after downloading what is not there.

    Raises CheckpointError: huggingface_hub is not installed, nothing is cached and the hub cannot be reached, there is no
    such repository, or it holds no model that can be loaded.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{repo_id!r} is no directory here, and reading it from the hub needs huggingface_hub: "
            "pip install 'nanokv[hub]', or name a directory"
        ) from None

    def snapshot(local: bool) -> Path:
        return Path(snapshot_download(repo_id, allow_patterns=FILES, ignore_patterns=IN_FOLDERS, local_files_only=local))

    try:
        cached = snapshot(local=True)
        if not missing_files(cached):
            return cached
    except errors.LocalEntryNotFoundError:
        pass
    try:
        directory = snapshot(local=False)
    except errors.GatedRepoError:
        raise CheckpointError(f"{repo_id!r} asks for consent: accept its terms on its hub page, then 'hf auth login'") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"the hub has no repository {repo_id!r}: check the spelling; a private one needs 'hf auth login'"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise CheckpointError(
            f"{repo_id!r} is not in the local cache and the hub cannot be reached: connect, unset HF_HUB_OFFLINE, "
            "or name a directory"
        ) from None
    except Exception as reason:  # whatever its HTTP library raises: huggingface_hub has changed that library twice
        raise CheckpointError(f"{repo_id!r} cannot be read from the hub: {first_line(reason)}") from None
    if missing := missing_files(directory):
        raise CheckpointError(
            f"{repo_id!r} comes without {', '.join(missing)}: the hub cannot be reached, or it is no model in safetensors files"
        )
    return directory


def first_line(error: Exception) -> str:
    """The part of a message that fits in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
