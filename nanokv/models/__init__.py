"""The models: pure functions from parameters, tokens and a cache to logits."""
