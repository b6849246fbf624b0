"""The caches: whatever yields tiles."""
