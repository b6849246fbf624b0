"""huggingface_hub, an optional extra: imported when a hub id is asked for, and what it raises in one line of words."""

from typing import Any

from nanokv.errors import CheckpointError


def hub_package(repo_id: str, instead: str = "") -> Any:
    """The package. CheckpointError where it is not installed; `instead` says what else could be named."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise CheckpointError(
            f"{repo_id!r} is not here, and reading it from the hub needs huggingface_hub: pip install 'nanokv[hub]'{instead}"
        ) from None
    return huggingface_hub


def hub_error(repo_id: str, reason: Exception) -> CheckpointError:
    """What the hub answered for a repository, or why it did not: whatever the package and its HTTP libraries raise."""
    from huggingface_hub import errors

    if isinstance(reason, errors.GatedRepoError):
        return CheckpointError(f"{repo_id!r} asks for consent: accept its terms on its hub page, then 'hf auth login'")
    if isinstance(reason, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{repo_id!r} is not here, and the hub has no repository of that name: check the spelling; a private one needs "
            "'hf auth login'"
        )
    if isinstance(reason, errors.LocalEntryNotFoundError):
        return CheckpointError(
            f"{repo_id!r} is not in the local cache and the hub cannot be reached: connect, unset HF_HUB_OFFLINE, or name what "
            "is here"
        )
    words = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    return CheckpointError(f"{repo_id!r} cannot be read from the hub: {words}")
