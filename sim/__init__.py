"""The simulator: how many bytes attention moves through SRAM and HBM, counted while the runtime's own fold runs.

`memory` is the machine, `schedules` the algorithms, `run` puts a shape through some of them, `roofline` turns counts into a
lower bound on time. docs/simulator.md has the model, its limits and how it compares with what was published and measured.
"""
