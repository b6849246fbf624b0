"""The two small things that the planner needs of a model on the Hugging Face hub: config.json and the tensors' sizes.

No weights are downloaded: huggingface_hub reads the headers of the safetensors files by range requests. The package is an
optional extra, imported when a hub id is asked for.
"""

from pathlib import Path

from nanokv.errors import CheckpointError
from nanokv.hub import hub_error, hub_package


def fetch_config(repo_id: str) -> Path:
    """config.json of a repository, in the local cache. CheckpointError says why there is none."""
    hub = hub_package(repo_id)
    try:
        return Path(hub.hf_hub_download(repo_id, "config.json"))
    except hub.errors.LocalEntryNotFoundError as reason:  # one of the next kind, too
        raise hub_error(repo_id, reason) from None
    except hub.errors.EntryNotFoundError:
        raise CheckpointError(f"{repo_id!r} has no config.json") from None
    except Exception as reason:
        raise hub_error(repo_id, reason) from None


def fetch_tensors(repo_id: str) -> list[tuple[int, int]] | None:
    """(elements, bytes) of every tensor of the repository's safetensors files; None where they cannot be had."""
    hub = hub_package(repo_id)
    try:
        files = hub.get_safetensors_metadata(repo_id).files_metadata.values()
    except Exception:  # no safetensors, no network: the weights' size is then simply not known
        return None
    return [
        (tensor.parameter_count, tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in files
        for tensor in file.tensors.values()
    ]
