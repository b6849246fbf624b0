"""The numbers by which the compiled attention and its callers understand each other. Imports nothing."""

TILE = 128  # keys a tile, as nanokv.kv.tile
FEW = 8  # rows of a run up to which its tiles are shared out

# Columns of a run of rows that fold the same tiles: its rows, its tiles in the list, its window (0: none) and sinks.
BEGIN, END, FIRST, LAST, WINDOW, SINKS, RUN_COLUMNS = range(7)
# Columns of a tile: its number, its codec, the addresses of three planes of keys and three of values, which query it meets
# (0 or 1), and the positions low .. high - 1 to which it is limited.
NUMBER, CODEC, KEYS, VALUES, QUERY, LOW, HIGH, TILE_COLUMNS = 0, 1, 2, 5, 8, 9, 10, 11
NO_LIMIT = 1 << 62
FLOAT32, FLOAT16, BFLOAT16, INT8, FP8, FP8_FIXED, INT4 = range(7)
