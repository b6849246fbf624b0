"""The numbers by which the compiled attention and its callers understand each other. Imports nothing."""

TILE = 128  # keys a tile, as nanokv.kv.tile
FEW = 8  # rows of a run up to which its tiles are shared out

# Columns of a run of rows that fold the same tiles: its rows, its tiles in the list, its window (0: none) and sinks.
BEGIN, END, FIRST, LAST, WINDOW, SINKS = range(6)
# Columns of a tile: its number, its codec, and the addresses of three planes of keys and three of values.
NUMBER, CODEC, KEYS, VALUES, TILE_COLUMNS = 0, 1, 2, 5, 8
FLOAT32, FLOAT16, BFLOAT16, INT8, FP8, FP8_FIXED, INT4 = range(7)
