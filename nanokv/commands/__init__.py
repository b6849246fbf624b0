"""The top floor: one file a command. Parse, call, print; no arithmetic."""
