"""Every model_type that the planner knows: how its file is read, one file for each way of shaping a cache."""

from collections.abc import Mapping

from sim.planner.families import latent, patterned, recurrent, uniform
from sim.planner.families.base import Reader

READERS: Mapping[str, Reader] = {**uniform.READERS, **patterned.READERS, **latent.READERS, **recurrent.READERS}
