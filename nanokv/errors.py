"""Every error that nanokv raises on purpose. A message says in one line what was wrong and what to do."""


class NanoKVError(Exception):
    """Base of all of them; the command line prints the message and exits with `exit_code`."""

    exit_code = 1


class UsageError(NanoKVError, ValueError):
    """An argument is out of its range or does not go with another."""

    exit_code = 2


class ConfigError(NanoKVError, ValueError):
    """A model configuration that is incomplete, absurd or not supported."""


class CheckpointError(NanoKVError):
    """A weight file that is missing, damaged, or does not hold what its configuration says."""


class TokenizerError(NanoKVError):
    """A tokenizer file that is missing, damaged or of an unknown kind; or a token id that is not in it."""


class CapacityError(NanoKVError):
    """More tokens than a cache or a model has positions for. Nothing was written."""


class OutOfMemory(NanoKVError, MemoryError):  # noqa: N818 - the field's name for it
    """The host or the card has no memory for what was asked. Caches and engines are as they were: less can be tried."""


class BackendError(NanoKVError):
    """The requested array library or device is not usable."""
