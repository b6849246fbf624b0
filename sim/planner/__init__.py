"""The planner: how much KV a model needs, what fits, and what real traffic makes of the memory.

Sizes. geometry.py reads any decoder's config.json (families/ has one file for each way of shaping a cache, fields.py the
spellings) and gguf_file.py a GGUF's metadata, both into layers.py's terms; hub.py fetches a config, and model.py is what a
user names. capacity.py turns layers into bytes (kv_formats.py) and back, plan.py puts them on GPUs, weights_size.py and
parameters.py say what the weights take, and report.py says it all to people and programs.

Traffic. traces.py reads requests. replay.py runs them through the runtime's scheduler, on the runtime's blocks (paging.py)
or on reservations (reservation.py): kv_memory.py says what both must answer. step_time.py is how long a step takes,
timeline.py what memory held meanwhile, server.py the machine and the policies, and replay_report.py the answer.
"""
