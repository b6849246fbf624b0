"""The two small things that the planner needs of a model on the Hugging Face hub: config.json and the tensors' sizes.

No weights are downloaded: huggingface_hub reads the headers of the safetensors files by range requests. The package is an
optional extra, imported when a hub id is asked for.
"""

from pathlib import Path
from typing import Any

from nanokv.errors import CheckpointError


def fetch_config(repo_id: str) -> Path:
    """config.json of a repository, in the local cache. CheckpointError says why there is none."""
    hub = _package(repo_id)
    try:
        return Path(hub.hf_hub_download(repo_id, "config.json"))
    except hub.errors.GatedRepoError:
        raise CheckpointError(f"{repo_id!r} asks for consent: accept its terms on its hub page, then 'hf auth login'") from None
    except hub.errors.RepositoryNotFoundError:
        raise CheckpointError(f"{repo_id!r} is neither a file here nor a repository on the hub: check the spelling") from None
    except hub.errors.LocalEntryNotFoundError:
        raise CheckpointError(f"{repo_id!r} is no file here, not in the local cache, and the hub cannot be reached") from None
    except hub.errors.EntryNotFoundError:
        raise CheckpointError(f"{repo_id!r} has no config.json") from None
    except Exception as reason:  # whatever its HTTP library raises
        raise CheckpointError(f"{repo_id!r} cannot be read from the hub: {_first_line(reason)}") from None


def fetch_tensors(repo_id: str) -> list[tuple[int, int]] | None:
    """(elements, bytes) of every tensor of the repository's safetensors files; None where they cannot be had."""
    hub = _package(repo_id)
    try:
        files = hub.get_safetensors_metadata(repo_id).files_metadata.values()
    except Exception:  # no safetensors, no network: the weights' size is then simply not known
        return None
    return [
        (tensor.parameter_count, tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in files
        for tensor in file.tensors.values()
    ]


def _package(repo_id: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise CheckpointError(
            f"{repo_id!r} is no file here, and reading it from the hub needs huggingface_hub: pip install 'nanokv[hub]'"
        ) from None
    return huggingface_hub


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
