"""The planner: how much KV a model needs, and what fits.

geometry.py reads any decoder's config.json (families/ has one file for each way of shaping a cache) and gguf_file.py a
GGUF's metadata, both into layers.py's terms. capacity.py turns those into bytes and back, plan.py puts them on GPUs,
weights_size.py and parameters.py say what the weights take, and report.py says it all to people and programs.
"""
