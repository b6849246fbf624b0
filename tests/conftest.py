"""Hypothesis profiles: `default` for every day, `thorough` for a long look (pytest --hypothesis-profile thorough)."""

from hypothesis import HealthCheck, settings

from tests.support import EVERYDAY

quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", deadline=None, max_examples=EVERYDAY, derandomize=True, suppress_health_check=quiet)
settings.register_profile("thorough", deadline=None, max_examples=1000, suppress_health_check=quiet)
settings.load_profile("default")
